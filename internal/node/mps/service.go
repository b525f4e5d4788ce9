package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Modes reads and sets the compute mode of GPUs: EXCLUSIVE_PROCESS, or else DEFAULT.
type Modes interface {
	Exclusive(id accel.DeviceID) (bool, error)
	SetExclusive(id accel.DeviceID, exclusive bool) error
}

// Service runs the control daemons of a node. It is for one goroutine.
type Service struct {
	// Dir is Dir as this process sees it, and Inside as the control daemons see it.
	Dir, Inside string
	// Prepare makes the driver's programs of a folder of the host usable. It is called before
	// control daemons are started, and returns the vendor's program.
	Prepare func(driverRoot string) (Tool, error)
	// Open returns the compute modes for one pass, and what ends it.
	Open func(driverRoot string) (Modes, func(), error)
	// Log is told what is done, from several goroutines.
	Log func(err error, message string, id accel.DeviceID)
	Now func() time.Time

	daemons map[accel.DeviceID]*daemon
	// tool is for the driver in root.
	tool Tool
	root string
}

// daemon is a control daemon that runs, or has ended.
type daemon struct {
	control
	cmd *exec.Cmd
	// ended is closed when the process has ended, with its error in err.
	ended chan struct{}
	err   error
}

// Run makes passes until ctx ends, and then stops all control daemons and gives the GPUs
// back. The programs that use them end with an error.
func (s *Service) Run(ctx context.Context) error {
	defer s.stopAll()
	if err := os.MkdirAll(s.Dir, 0o755); err != nil { // containers of any user reach their pipes through it
		return err
	}
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	for {
		if err := s.Pass(ctx); err != nil && ctx.Err() == nil {
			s.Log(err, "Could not follow what the node needs of MPS", "")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Pass starts control daemons that are wanted and do not run, stops those that are not
// wanted once no program uses them, and writes the report.
func (s *Service) Pass(ctx context.Context) error {
	wish, err := ReadWish(s.Dir)
	if err != nil {
		return err
	}
	r := Report{Devices: map[accel.DeviceID]*DeviceReport{}}
	modes, done, err := s.open(wish)
	if err == nil {
		defer done()
	}
	var work sync.WaitGroup
	served := make([]*daemon, len(wish.Devices))
	for i, id := range wish.Devices {
		one, before := &DeviceReport{}, s.daemons[id]
		r.Devices[id] = one
		failed := err
		if failed == nil {
			failed = s.exclude(id, modes, one)
		}
		if served[i] = before; failed != nil {
			one.Problem = failed.Error()
			continue
		}
		work.Go(func() { // a daemon that does not answer delays no other
			if served[i], failed = s.serve(ctx, id, before, one); failed != nil {
				one.Problem = failed.Error()
			}
		})
	}
	work.Wait()
	if s.daemons == nil {
		s.daemons = map[accel.DeviceID]*daemon{}
	}
	for i, id := range wish.Devices {
		if s.daemons[id] = served[i]; served[i] == nil {
			delete(s.daemons, id)
		}
	}
	for id, d := range s.daemons {
		if !slices.Contains(wish.Devices, id) && err == nil {
			s.release(ctx, id, d, modes)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r.Time = s.Now().UTC()
	return errors.Join(err, WriteReport(s.Dir, r))
}

// open prepares a pass over the wanted GPUs.
func (s *Service) open(wish Wish) (Modes, func(), error) {
	if len(wish.Devices) == 0 && len(s.daemons) == 0 {
		return nil, func() {}, nil
	}
	if root := cmp.Or(wish.DriverRoot, "/"); s.tool == nil || s.root != root {
		tool, err := s.Prepare(root)
		if err != nil {
			return nil, nil, err
		}
		s.tool, s.root = tool, root
	}
	return s.Open(s.root)
}

// exclude makes sure that only one process has a context of a GPU, which is a server of MPS.
func (s *Service) exclude(id accel.DeviceID, modes Modes, r *DeviceReport) (err error) {
	if r.Exclusive, err = modes.Exclusive(id); err != nil {
		return fmt.Errorf("read the compute mode: %w", err)
	}
	if !r.Exclusive {
		if err := modes.SetExclusive(id, true); err != nil {
			return fmt.Errorf("set the compute mode to EXCLUSIVE_PROCESS: %w", err)
		}
		s.Log(nil, "Set the compute mode to EXCLUSIVE_PROCESS", id)
	}
	return nil
}

// serve makes the control daemon of a GPU run, d if it does, and reports what it says.
func (s *Service) serve(ctx context.Context, id accel.DeviceID, d *daemon, r *DeviceReport) (_ *daemon, err error) {
	if d != nil {
		select {
		case <-d.ended:
			s.Log(d.err, "The control daemon of MPS has ended; starting it again", id)
			d = nil
		default:
		}
	}
	if d == nil {
		if d, err = s.start(ctx, id); err != nil {
			return nil, fmt.Errorf("start the control daemon of MPS: %w", err)
		}
	}
	r.Servers, err = d.servers(ctx)
	return d, err
}

// startTimeout is how long a control daemon may take until it answers.
const startTimeout = 5 * time.Second

// start starts a control daemon and waits until it answers.
func (s *Service) start(ctx context.Context, id accel.DeviceID) (*daemon, error) {
	pipes, logs := PipeDir(s.Dir, id), LogDir(s.Dir, id)
	// What a daemon has left that has ended is in the way of the next one. The folder itself stays:
	// containers have it mounted.
	left, err := filepath.Glob(filepath.Join(pipes, "*"))
	if err != nil {
		return nil, err
	}
	for _, path := range left {
		if err := os.RemoveAll(path); err != nil {
			return nil, err
		}
	}
	for _, dir := range []string{pipes, logs} {
		if err := os.MkdirAll(dir, 0o755); err != nil { // clients of any user open the pipes, which have modes of their own
			return nil, err
		}
	}
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "CUDA_VISIBLE_DEVICES=" + string(id),
		"CUDA_MPS_PIPE_DIRECTORY=" + PipeDir(s.Inside, id), "CUDA_MPS_LOG_DIRECTORY=" + LogDir(s.Inside, id)}
	// The daemon outlives the pass, and is stopped by its own command.
	cmd, err := s.tool(context.WithoutCancel(ctx), env, "-f", "--multiuser-server")
	if err != nil {
		return nil, err
	}
	said, err := os.Create(filepath.Join(logs, "start.log"))
	if err != nil {
		return nil, err
	}
	defer said.Close() //nolint:errcheck // the daemon has it open
	cmd.Stdout, cmd.Stderr = said, said
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true // a signal to this program is not one to the daemon, which is told to quit
	d := &daemon{control: control{s.tool, env}, cmd: cmd, ended: make(chan struct{})}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		d.err = cmd.Wait()
		close(d.ended)
	}()
	deadline := time.Now().Add(startTimeout)
	for {
		if _, err = d.send(ctx, "get_server_list"); err == nil {
			s.Log(nil, "Started the control daemon of MPS", id)
			return d, nil
		}
		select {
		case <-d.ended:
			text, _ := os.ReadFile(said.Name())
			return nil, fmt.Errorf("it has ended (%w): %s", cmp.Or(d.err, errors.New("exit status 0")), firstLine(string(text)))
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			d.kill()
			return nil, err
		}
	}
}

// kill ends the daemon and its servers.
func (d *daemon) kill() {
	_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL) // it may have ended
	<-d.ended
}

// release stops a control daemon that no program uses, and gives the GPU back.
func (s *Service) release(ctx context.Context, id accel.DeviceID, d *daemon, modes Modes) {
	select {
	case <-d.ended:
	default:
		servers, err := d.servers(ctx)
		if err != nil || slices.ContainsFunc(servers, func(s Server) bool { return len(s.Clients) > 0 }) {
			return // the next pass looks again
		}
		d.stop(ctx)
	}
	if err := modes.SetExclusive(id, false); err != nil {
		s.Log(err, "Could not set the compute mode back to DEFAULT", id)
		return
	}
	delete(s.daemons, id)
	s.Log(nil, "Stopped the control daemon of MPS, and set the compute mode to DEFAULT", id)
}

// stopTimeout is how long servers have to end.
const stopTimeout = 5 * time.Second

// stop ends a control daemon with its servers.
func (d *daemon) stop(ctx context.Context) {
	_, err := d.send(ctx, fmt.Sprintf("quit -t %d", int(stopTimeout.Seconds())-1))
	if err == nil {
		select {
		case <-d.ended:
			return
		case <-time.After(stopTimeout):
		}
	}
	d.kill()
}

// stopAll stops all control daemons and gives their GPUs back.
func (s *Service) stopAll() {
	_ = os.Remove(filepath.Join(s.Dir, reportFile)) // an old one counts for nothing anyway
	if len(s.daemons) == 0 {
		return
	}
	var work sync.WaitGroup
	for _, d := range s.daemons {
		work.Go(func() { d.stop(context.Background()) })
	}
	work.Wait()
	modes, done, err := s.Open(s.root)
	if err != nil {
		s.Log(err, "Could not set compute modes back to DEFAULT", "")
		return
	}
	defer done()
	for id := range s.daemons {
		if err := modes.SetExclusive(id, false); err != nil {
			s.Log(err, "Could not set the compute mode back to DEFAULT", id)
		}
	}
	s.daemons = nil
}
