package schedbatch

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// The test runs itself again, as what Enter does to a process is for its whole life.
const again = "DIVVY_TEST_BATCH"

func TestMain(m *testing.M) {
	if os.Getenv(again) == "" {
		os.Exit(m.Run())
	}
	if err := inABatch(); err != "" {
		os.Stdout.WriteString(err) //nolint:errcheck // the test sees an empty answer
		os.Exit(1)
	}
	os.Stdout.WriteString("all are") //nolint:errcheck // the test sees an empty answer
}

// inABatch enters, starts threads meanwhile and after it, and says what is wrong.
func inABatch() string {
	var threads sync.WaitGroup
	stop := make(chan struct{})
	start := func(n int) {
		for range n {
			started := make(chan struct{})
			threads.Go(func() {
				runtime.LockOSThread() // so that it has one of its own
				close(started)
				<-stop
			})
			<-started
		}
	}
	var meanwhile sync.WaitGroup
	meanwhile.Go(func() { start(30) })
	err := Enter()
	meanwhile.Wait()
	if err != nil {
		return err.Error()
	}
	start(10)
	defer threads.Wait()
	defer close(stop)
	all, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err.Error()
	}
	if len(all) < 10 {
		return "there are only " + strconv.Itoa(len(all)) + " threads"
	}
	for _, thread := range all {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			return err.Error()
		}
		attr, err := unix.SchedGetAttr(id, 0)
		if err != nil {
			return err.Error()
		}
		if attr.Policy != unix.SCHED_BATCH {
			return "thread " + thread.Name() + " has policy " + strconv.Itoa(int(attr.Policy))
		}
	}
	return ""
}

func TestEnter(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env = append(os.Environ(), again+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.HasSuffix(string(out), "all are") {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// What somebody chose stays, and so does the nice value of what is changed.
func TestEnterLeavesOthersChoices(t *testing.T) {
	runtime.LockOSThread() // and the thread ends with the test
	thread := unix.Gettid()
	for _, step := range []struct{ chosen, want uint32 }{
		{chosen: unix.SCHED_NORMAL, want: unix.SCHED_BATCH},
		{chosen: unix.SCHED_IDLE, want: unix.SCHED_IDLE},
	} {
		if err := unix.SchedSetAttr(thread, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: step.chosen, Nice: 5}, 0); err != nil {
			t.Fatal(err)
		}
		if err := Enter(); err != nil {
			t.Fatal(err)
		}
		attr, err := unix.SchedGetAttr(thread, 0)
		if err != nil || attr.Policy != step.want || attr.Nice != 5 {
			t.Errorf("a thread with policy %d and nice value 5 has %+v, %v", step.chosen, attr, err)
		}
	}
}
