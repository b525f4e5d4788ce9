package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
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
	// Tidy, if it is set, removes what ended containers have left in the shared memory, given the
	// servers, which have no clients.
	Tidy func(servers []int) error
	// Log is told what is done, from several goroutines.
	Log func(err error, message string, id accel.DeviceID)
	Now func() time.Time

	// Wait is how long a pass waits for a device and for the driver, Interval if it is 0.
	Wait time.Duration

	daemons map[accel.DeviceID]*daemon
	// jobs are what passes do with devices and have not ended, and opening is what opens the driver
	// and has not answered in time.
	jobs    map[accel.DeviceID]*job
	opening chan opened
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
	// failed is how many passes in a row got no answer, and clients are those of the last answer.
	failed  int
	clients []int
	// tried is when a server was to be started last, if none was seen since.
	tried time.Time
}

// job is what a pass does with a device. Its fields are for others after it has ended.
type job struct {
	ended  chan struct{}
	daemon *daemon // nil if there is none any more
	report DeviceReport
}

// opened is an opened driver.
type opened struct {
	modes Modes
	done  func()
	tool  Tool
	root  string
	err   error
}

func (o opened) close() {
	if o.err == nil {
		o.done()
	}
}

// errHung is the problem of a device for which a pass has waited in vain.
var errHung = errors.New("the driver or the control daemon of MPS does not respond; its process may be stuck in the kernel")

// Run makes passes until ctx ends, and then stops all control daemons and gives the GPUs
// back. The programs that use them end with an error.
func (s *Service) Run(ctx context.Context) error {
	defer s.stopAll()
	if err := os.MkdirAll(s.Dir, 0o755); err != nil { // containers of any user reach their pipes through it
		return err
	}
	// What a service that was killed has left: no daemon answers there.
	stale, err := filepath.Glob(PipeDir(s.Dir, "*"))
	if err != nil {
		return err
	}
	for _, path := range stale {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
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
// wanted once no program uses them, and writes the report. A device that does not respond delays
// no other for long, and is left alone until it does.
func (s *Service) Pass(ctx context.Context) error {
	wish, err := ReadWish(s.Dir)
	if err != nil {
		return err
	}
	if s.jobs == nil {
		s.daemons, s.jobs = map[accel.DeviceID]*daemon{}, map[accel.DeviceID]*job{}
	}
	for id, j := range s.jobs {
		s.settle(id, j)
	}
	r := Report{Devices: map[accel.DeviceID]*DeviceReport{}}
	bounded, cancel := context.WithTimeout(ctx, cmp.Or(s.Wait, Interval))
	defer cancel()
	driver := s.open(bounded, wish)
	var work sync.WaitGroup
	begin := func(id accel.DeviceID, what func(j *job)) {
		if s.jobs[id] != nil || driver.err != nil {
			return
		}
		j := &job{ended: make(chan struct{}), daemon: s.daemons[id]}
		s.jobs[id] = j
		work.Go(func() {
			defer close(j.ended)
			what(j)
		})
	}
	for _, id := range wish.Devices {
		begin(id, func(j *job) {
			if err := s.serve(ctx, id, driver.modes, j); err != nil {
				j.report.Problem = err.Error()
			}
		})
	}
	for id := range s.daemons {
		if !slices.Contains(wish.Devices, id) {
			begin(id, func(j *job) { s.release(ctx, id, driver.modes, j) })
		}
	}
	all := make(chan struct{})
	go func() {
		work.Wait()
		driver.close() // what is stuck may use it still
		close(all)
	}()
	select {
	case <-all:
	case <-bounded.Done():
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	for _, id := range wish.Devices {
		r.Devices[id] = &DeviceReport{Problem: cmp.Or(driver.err, errHung).Error()}
	}
	for id, j := range s.jobs {
		if s.settle(id, j) && r.Devices[id] != nil && driver.err == nil {
			r.Devices[id] = &j.report
		}
	}
	for id, one := range r.Devices {
		if one.Problem != "" {
			s.unpublish(id)
		}
	}
	r.Time = s.Now().UTC()
	return errors.Join(driver.err, s.tidy(r), WriteReport(s.Dir, r))
}

// tidy makes Tidy remove what is left when no daemon has clients.
func (s *Service) tidy(r Report) error {
	if s.Tidy == nil || len(s.jobs) > 0 || len(s.daemons) != len(r.Devices) {
		return nil // what does not respond may have clients
	}
	var servers []int
	for _, d := range r.Devices {
		if d.Problem != "" || len(d.Servers) == 0 {
			return nil // one that has just been started may not be listed, and have files already
		}
		for _, one := range d.Servers {
			if len(one.Clients) > 0 {
				return nil
			}
			servers = append(servers, one.PID)
		}
	}
	return s.Tidy(servers)
}

// settle takes in a job that has ended, and reports whether it has.
func (s *Service) settle(id accel.DeviceID, j *job) bool {
	select {
	case <-j.ended:
	default:
		return false
	}
	delete(s.jobs, id)
	if s.daemons[id] = j.daemon; j.daemon == nil {
		delete(s.daemons, id)
	}
	return true
}

// open prepares a pass over the wanted GPUs.
func (s *Service) open(ctx context.Context, wish Wish) opened {
	if len(wish.Devices) == 0 && len(s.daemons) == 0 {
		return opened{done: func() {}}
	}
	if s.opening != nil {
		select {
		case late := <-s.opening:
			s.keep(late).close()
			s.opening = nil
		default:
			return opened{err: errHung}
		}
	}
	root, tool := cmp.Or(wish.DriverRoot, "/"), s.tool
	if s.root != root {
		tool = nil
	}
	answer := make(chan opened, 1)
	go func() {
		o := opened{tool: tool, root: root}
		if o.tool == nil {
			o.tool, o.err = s.Prepare(root)
		}
		if o.err == nil {
			o.modes, o.done, o.err = s.Open(root)
		}
		answer <- o
	}()
	select {
	case o := <-answer:
		return s.keep(o)
	case <-ctx.Done():
		s.opening = answer
		return opened{err: errHung}
	}
}

// keep keeps the programs for the next passes: what makes them usable is done once.
func (s *Service) keep(o opened) opened {
	if o.tool != nil {
		s.tool, s.root = o.tool, o.root
	}
	return o
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

// serve makes the control daemon of a GPU run, and reports what it says.
func (s *Service) serve(ctx context.Context, id accel.DeviceID, modes Modes, j *job) error {
	if err := s.exclude(id, modes, &j.report); err != nil {
		return err
	}
	if d := j.daemon; d != nil && d.hasEnded() {
		s.Log(d.err, "The control daemon of MPS has ended; starting it again", id)
		j.daemon = nil
	}
	if j.daemon == nil {
		var err error
		if j.daemon, err = s.start(ctx, id); err != nil {
			return fmt.Errorf("start the control daemon of MPS: %w", err)
		}
	}
	var err error
	if j.report.Servers, err = j.daemon.withServer(ctx, s.Now()); err != nil {
		if j.daemon.isLost(daemonDir(s.Dir, id)) {
			s.Log(err, "The control daemon of MPS does not answer, and is ended to be started again", id)
			j.daemon.kill() // the next pass starts it if it has ended
		}
		return err
	}
	return s.publish(id)
}

// publish makes a GPU's pipes seen by containers.
func (s *Service) publish(id accel.DeviceID) error {
	link := PipeDir(s.Dir, id)
	if to, err := os.Readlink(link); err == nil && to == daemonFolder {
		return nil
	}
	return os.Symlink(daemonFolder, link)
}

// unpublish makes containers of a GPU impossible to create.
func (s *Service) unpublish(id accel.DeviceID) {
	if err := os.RemoveAll(PipeDir(s.Dir, id)); err != nil {
		s.Log(err, "Could not take the pipes of MPS from containers", id)
	}
}

// hasEnded reports whether the process has ended.
func (d *daemon) hasEnded() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}

// retryServer is the time between two attempts to start a server.
const retryServer = 10 * time.Minute

// withServer returns the servers, of which there is one before any client: until a server has the GPU, the
// first program that looks for another pipe gets it. One that does not start, as when a program has
// the GPU already, is tried again after retryServer, as each attempt leaves logs.
func (d *daemon) withServer(ctx context.Context, now time.Time) ([]Server, error) {
	servers, err := d.ask(ctx)
	switch {
	case err != nil:
		return nil, err
	case len(servers) > 0:
		d.tried = time.Time{}
		return servers, nil
	case now.Sub(d.tried) < retryServer:
		return nil, nil
	}
	d.tried = now
	// Its answer decides nothing: a daemon that does not answer says nothing to ask either.
	_, _ = d.send(ctx, "start_server -uid 0")
	return d.ask(ctx)
}

// ask returns the servers, and keeps what isLost needs.
func (d *daemon) ask(ctx context.Context) ([]Server, error) {
	servers, err := d.servers(ctx)
	if err != nil {
		d.failed++
		return nil, err
	}
	d.failed, d.clients = 0, nil
	for _, s := range servers {
		d.clients = append(d.clients, s.Clients...)
	}
	return servers, nil
}

// lostAfter is how many passes in a row get no answer of a daemon that is lost.
const lostAfter = 3

// isLost reports whether a daemon that has not answered never will, so that it is to be ended: its
// socket is gone, or it was silent for several passes and its last clients have ended.
func (d *daemon) isLost(pipes string) bool {
	if _, err := os.Lstat(filepath.Join(pipes, "control")); errors.Is(err, fs.ErrNotExist) {
		return true
	}
	return d.failed >= lostAfter && !slices.ContainsFunc(d.clients, func(pid int) bool {
		return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	})
}

// startTimeout is how long a control daemon may take until it answers.
const startTimeout = 5 * time.Second

// start starts a control daemon and waits until it answers.
func (s *Service) start(ctx context.Context, id accel.DeviceID) (*daemon, error) {
	s.unpublish(id)
	pipes, logs := daemonDir(s.Dir, id), LogDir(s.Dir, id)
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
		"CUDA_MPS_PIPE_DIRECTORY=" + daemonDir(s.Inside, id), "CUDA_MPS_LOG_DIRECTORY=" + LogDir(s.Inside, id)}
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
		s.unpublish(id)
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
			text := make([]byte, 1000)
			n, _ := said.ReadAt(text, 0)
			return nil, fmt.Errorf("it has ended (%w): %s", cmp.Or(d.err, errors.New("exit status 0")), firstLine(string(text[:n])))
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			if !d.kill() {
				return d, err
			}
			return nil, err
		}
	}
}

// kill ends the daemon and its servers, and reports whether it has ended: one that is stuck in the
// kernel does not.
func (d *daemon) kill() bool {
	_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL) // it may have ended
	return d.endsWithin(stopTimeout)
}

func (d *daemon) endsWithin(limit time.Duration) bool {
	select {
	case <-d.ended:
		return true
	case <-time.After(limit):
		return false
	}
}

// release stops a control daemon that no program uses, and gives the GPU back.
func (s *Service) release(ctx context.Context, id accel.DeviceID, modes Modes, j *job) {
	if d := j.daemon; !d.hasEnded() {
		servers, err := d.ask(ctx)
		if err != nil && !d.isLost(daemonDir(s.Dir, id)) ||
			slices.ContainsFunc(servers, func(s Server) bool { return len(s.Clients) > 0 }) {
			return // the next pass looks again
		}
		s.unpublish(id)
		if !d.stop(ctx) {
			s.Log(nil, "The control daemon of MPS does not end", id)
			return
		}
	}
	if err := modes.SetExclusive(id, false); err != nil {
		s.Log(err, "Could not set the compute mode back to DEFAULT", id)
		return
	}
	j.daemon = nil
	s.Log(nil, "Stopped the control daemon of MPS, and set the compute mode to DEFAULT", id)
}

// stopTimeout is how long servers have to end.
const stopTimeout = 5 * time.Second

// stop ends a control daemon with its servers, and reports whether it has ended.
func (d *daemon) stop(ctx context.Context) bool {
	_, err := d.send(ctx, fmt.Sprintf("quit -t %d", int(stopTimeout.Seconds())-1))
	return err == nil && d.endsWithin(stopTimeout) || d.kill()
}

// stopAll stops all control daemons and gives their GPUs back, whether or not divvy-node still
// wants them: if it does not, as after an uninstallation, nothing else would. Before that no
// container can be created, so that none runs without MPS. It ends also if something is stuck.
func (s *Service) stopAll() {
	_ = os.Remove(filepath.Join(s.Dir, reportFile)) // an old one counts for nothing anyway
	for _, ids := range []iter.Seq[accel.DeviceID]{maps.Keys(s.daemons), maps.Keys(s.jobs)} {
		for id := range ids {
			s.unpublish(id)
		}
	}
	jobs := slices.Collect(maps.Values(s.jobs))
	s.within(stopTimeout, func() {
		for _, j := range jobs {
			<-j.ended
		}
	})
	for id, j := range s.jobs {
		if s.settle(id, j) {
			s.unpublish(id)
		}
	}
	ids := slices.Collect(maps.Keys(s.daemons))
	if len(ids) == 0 {
		return
	}
	var work sync.WaitGroup
	for _, d := range s.daemons {
		work.Go(func() { d.stop(context.Background()) })
	}
	s.within(2*stopTimeout+commandTimeout, work.Wait)
	s.within(stopTimeout, func() {
		modes, done, err := s.Open(s.root)
		if err != nil {
			s.Log(err, "Could not set compute modes back to DEFAULT", "")
			return
		}
		defer done()
		var work sync.WaitGroup
		defer work.Wait()
		for _, id := range ids {
			work.Go(func() {
				if err := modes.SetExclusive(id, false); err != nil {
					s.Log(err, "Could not set the compute mode back to DEFAULT", id)
				}
			})
		}
	})
	s.daemons, s.jobs = nil, nil
}

// within waits for f, but not for longer than a limit.
func (s *Service) within(limit time.Duration, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(limit):
		s.Log(errHung, "Could not stop everything", "")
	}
}
