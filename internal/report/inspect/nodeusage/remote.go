package nodeusage

import (
	"context"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

// Remote returns an Exec through the API server, by websockets, and by SPDY where the API
// server or a proxy has none, as kubectl does.
func Remote(config *rest.Config, client kubernetes.Interface) Exec {
	return func(ctx context.Context, pod *corev1.Pod, container string, command []string, stdout, stderr io.Writer) error {
		url := client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
			VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true},
				scheme.ParameterCodec).URL()
		socket, err := remotecommand.NewWebSocketExecutor(config, "GET", url.String())
		if err != nil {
			return fmt.Errorf("connect to the API server: %w", err)
		}
		spdy, err := remotecommand.NewSPDYExecutor(config, "POST", url)
		if err != nil {
			return fmt.Errorf("connect to the API server: %w", err)
		}
		either, err := remotecommand.NewFallbackExecutor(socket, spdy, func(err error) bool {
			return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
		})
		if err != nil {
			return err
		}
		return either.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: stdout, Stderr: stderr})
	}
}
