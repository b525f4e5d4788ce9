package pool

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Where nothing stands between the client's options and the command, no command
// adds options: a pod would take more than it is charged for.
func TestCommandsAddNoOptionsToTheClient(t *testing.T) {
	c := client(t, "250", "ubuntu18")
	for _, command := range [][]string{
		{"-n 8 python x"}, {"-n 8 python $X"}, {"-n 8 python *"}, {"\t-n 8 python $X # c"}, {"-n", "8", "python"},
		{"bash", "-c", "-n 8 python $X"},
		{"$(OPTION)", "8", "python"}, {"$(OPTION)"},
	} {
		wrapped, _, _, err := c.Wrap(half, nil, command, nil)
		if err == nil {
			t.Errorf("%q became %q", command, wrapped)
		} else if !strings.Contains(err.Error(), "begin with a program") {
			t.Errorf("%q: %v", command, err)
		}
	}
	for _, command := range [][]string{{"python $X"}, {"python", "$(X)"}, {"$X -n 8"}, {`"-n" 8`}} {
		if _, _, _, err := c.Wrap(half, nil, command, nil); err != nil {
			t.Errorf("%q: %v", command, err)
		}
	}
}

func TestUnknownKeysAreNamedWithTheirValueAndBounded(t *testing.T) {
	list := corev1.ResourceList{AmountResource: resource.MustParse("1"), Prefix + "gpus": resource.MustParse("7")}
	for i := range 1000 {
		list[corev1.ResourceName(Prefix+"z"+strings.Repeat("z", i))] = resource.MustParse("1")
	}
	_, err := ParseRequest(corev1.ResourceRequirements{Limits: list}, 16000)
	if err == nil || !strings.Contains(err.Error(), Prefix+"gpus: 7 (and 1000 more) is not a key of the pool; write "+AmountResource) ||
		len(err.Error()) > 1000 {
		t.Errorf("%.2000v", err)
	}
}
