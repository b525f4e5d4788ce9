// Package mpssim acts as NVIDIA's program nvidia-cuda-mps-control, at its command line: it
// starts a control daemon, or sends commands to one. There are no GPUs and no clients: which
// servers there are, and how they are, is in a file beside the pipe that a test writes.
package mpssim

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Program is the name of the vendor's program.
const Program = "nvidia-cuda-mps-control"

// Server is a server of a simulated control daemon.
type Server struct {
	PID     int
	State   string // INITIALIZING, ACTIVE or FAULT
	Clients []int
}

// State is how a control daemon answers.
type State struct {
	Servers []Server
	// Hangs is true for one that accepts commands and does not answer.
	Hangs bool
	// Floods is true for one whose answers have no end.
	Floods bool
	// Refuses is true for one whose servers end at once, as when a program has the GPU.
	Refuses bool
}

// stateFile is in the folder of the pipe's folder.
func stateFile(pipes string) string { return filepath.Join(filepath.Dir(pipes), "sim.json") }

// SetState makes the control daemon of a folder of pipes answer so from now on.
func SetState(pipes string, s State) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	next := stateFile(pipes) + ".new"
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return err
	}
	return os.Rename(next, stateFile(pipes))
}

func readState(pipes string) (s State, err error) {
	data, err := os.ReadFile(stateFile(pipes))
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	} else if err == nil {
		err = json.Unmarshal(data, &s)
	}
	return s, err
}

// Main runs the program with its arguments, without its name, and returns its exit code.
func Main(args []string, in io.Reader, out, problems io.Writer) int {
	pipes := os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	if pipes == "" {
		pipes = "/tmp/nvidia-mps"
	}
	var background, foreground bool
	for _, a := range args {
		switch a {
		case "-d":
			background = true
		case "-f":
			foreground = true
		case "--multiuser-server", "-multiuser-server":
		default:
			fmt.Fprintf(problems, "Unknown option: %s\nUsage: %s [-d | -f] [-multiuser-server]\n", a, Program)
			return 1
		}
	}
	var err error
	switch {
	case background:
		err = detach(args)
	case foreground:
		err = serve(pipes)
	default:
		err = send(pipes, in, out)
	}
	if err != nil {
		fmt.Fprintln(problems, err)
		return 1
	}
	return 0
}

// detach runs the daemon as a process of its own.
func detach(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(context.Background(), self)
	cmd.Args = []string{Program}
	for _, a := range args {
		cmd.Args = append(cmd.Args, strings.Replace(a, "-d", "-f", 1))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd.Start()
}

// serve is the control daemon.
func serve(pipes string) error {
	if err := os.MkdirAll(pipes, 0o755); err != nil {
		return err
	}
	socket := filepath.Join(pipes, "control")
	if c, err := net.Dial("unix", socket); err == nil { //nolint:gosec // the vendor's variable names it
		_ = c.Close()
		return errors.New("An instance of this daemon is already running") //nolint:staticcheck // as the vendor's says
	}
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	defer l.Close() //nolint:errcheck // the process ends
	started := false
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		quit := answer(pipes, c, &started)
		_ = c.Close()
		if quit {
			return nil
		}
	}
}

// answer answers the commands of a connection, and reports whether the daemon is to end. started is
// true after start_server: the daemon itself then stands for the server, unless the file has some.
func answer(pipes string, c net.Conn, started *bool) (quit bool) {
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		state, err := readState(pipes)
		if *started && len(state.Servers) == 0 {
			state.Servers = []Server{{PID: os.Getpid(), State: "ACTIVE"}}
		}
		if state.Hangs {
			<-time.After(time.Minute)
		}
		for state.Floods {
			if _, err := fmt.Fprintln(c, "1"); err != nil {
				return false
			}
		}
		words := strings.Fields(lines.Text())
		switch {
		case err != nil:
			fmt.Fprintln(c, err)
		case len(words) == 0:
		case words[0] == "quit":
			return true
		case slices.Equal(words, []string{"start_server", "-uid", "0"}):
			*started = !state.Refuses
		case words[0] == "get_server_list":
			for _, s := range state.Servers {
				fmt.Fprintln(c, s.PID)
			}
		default:
			state.describe(c, words)
		}
	}
	return false
}

// describe answers a command about a server.
func (s State) describe(w io.Writer, words []string) {
	if !slices.Contains([]string{"get_server_status", "get_client_list"}, words[0]) {
		fmt.Fprintf(w, "Unrecognized command: %s\n", words[0])
		return
	}
	i := -1
	if len(words) == 2 {
		i = slices.IndexFunc(s.Servers, func(s Server) bool { return strconv.Itoa(s.PID) == words[1] })
	}
	if i < 0 {
		fmt.Fprintln(w, "Server not found")
		return
	}
	if words[0] == "get_server_status" {
		fmt.Fprintln(w, s.Servers[i].State)
		return
	}
	for _, pid := range s.Servers[i].Clients {
		fmt.Fprintln(w, pid)
	}
}

// send sends the commands of the standard input.
func send(pipes string, in io.Reader, out io.Writer) error {
	c, err := net.Dial("unix", filepath.Join(pipes, "control")) //nolint:gosec // as above
	if err != nil {
		return errors.New("Cannot find MPS control daemon process") //nolint:staticcheck // as the vendor's says
	}
	defer c.Close() //nolint:errcheck // the process ends
	if _, err := io.Copy(c, in); err != nil {
		return err
	}
	if err := c.(*net.UnixConn).CloseWrite(); err != nil {
		return err
	}
	_, err = io.Copy(out, c)
	return err
}
