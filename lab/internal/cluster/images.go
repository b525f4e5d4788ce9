package cluster

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// schedulerInImage is where the program lies in the scheduler's image.
const schedulerInImage = "/usr/local/bin/kube-scheduler"

// busybox is the static program that Debian's busybox-static installs.
const busybox = "/bin/busybox"

// allocator is the name of the program in that image that allocates memory of a GPU.
const allocator = "alloc"

// shellApplets are the commands of the image for pods of demo and tests.
var shellApplets = []string{
	"sh", "cat", "echo", "env", "false", "grep", "hostname", "id", "ip", "kill", "ls", "mkdir", "nc", "ps",
	"rm", "sed", "sleep", "stat", "test", "touch", "tr", "true", "wc", "wget",
}

// schedulerImage is the image that kubeadm would run for this version.
func (c *Cluster) schedulerImage() string {
	return "registry.k8s.io/kube-scheduler:" + c.kubernetesVersion()
}

// kubernetesVersion returns the version that the programs were built from,
// with its leading v.
func (c *Cluster) kubernetesVersion() string { return c.record.KubernetesVersion }

// loadImages makes the lab's own images and hands them to containerd.
func (c *Cluster) loadImages(ctx context.Context, labDir string) error {
	pause := filepath.Join(layout.StateDir, "pause")
	if err := build.RunGo(ctx, labDir, []string{"CGO_ENABLED=0"}, nil,
		"build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", pause, "./cmd/pause"); err != nil {
		return fmt.Errorf("build the sandbox's program: %w", err)
	}
	if _, err := vendorsim.BuildAllocator(ctx, layout.StateDir); err != nil {
		return err
	}
	shell, err := shellSpec(busybox, filepath.Join(layout.StateDir, allocator))
	if err != nil {
		return err
	}
	specs := []image.Spec{
		{
			Name: PauseImage, Entrypoint: []string{"/pause"}, User: "65535:65535",
			Files: []image.File{{Path: "/pause", Source: pause}},
		},
		{
			Name:       c.schedulerImage(),
			Entrypoint: []string{schedulerInImage},
			Files: []image.File{
				{Path: schedulerInImage, Source: c.Program("kube-scheduler")},
				{Path: "/tmp", Dir: true, Mode: 0o777 | fs.ModeSticky},
			},
		},
		shell,
	}
	for _, spec := range specs {
		img, err := image.Build(spec)
		if err != nil {
			return err
		}
		names := []string{spec.Name}
		if spec.Name == ShellImage {
			// What the examples of the repository run; the lab pulls nothing.
			names = append(names, "docker.io/library/busybox:1.37")
		}
		if _, err := c.Images().Load(ctx, img, names...); err != nil {
			return err
		}
	}
	return nil
}

// shellSpec returns an image of one static program under many names, and of the program
// that allocates memory of a GPU, with what it loads. The driver's library is not in it:
// a container gets that with its GPU.
func shellSpec(program, alloc string) (image.Spec, error) {
	files, err := image.Libraries(alloc)
	if err != nil {
		return image.Spec{}, err
	}
	files = append(files, []image.File{
		{Path: "/bin/busybox", Source: program},
		{Path: "/bin/" + allocator, Source: alloc},
		{Path: "/tmp", Dir: true, Mode: 0o777 | fs.ModeSticky},
		{Path: "/etc/passwd", Content: []byte("root:x:0:0:root:/:/bin/sh\n"), Mode: 0o644},
		{Path: "/etc/group", Content: []byte("root:x:0:\n"), Mode: 0o644},
	}...)
	for _, applet := range shellApplets {
		files = append(files, image.File{Path: "/bin/" + applet, Target: "busybox"})
	}
	// Existing pod specs call for bash out of habit; a plain shell serves them.
	files = append(files, image.File{Path: "/bin/bash", Content: []byte(strings.Join([]string{
		"#!/bin/sh", `exec /bin/sh "$@"`, "",
	}, "\n"))})
	return image.Spec{Name: ShellImage, Files: files, Cmd: []string{"sleep", "infinity"}}, nil
}
