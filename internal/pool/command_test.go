package pool

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mvdan.cc/sh/v3/syntax"
)

var (
	half   = Request{Amount: 1, Percent: 50, Units: 50}
	memory = Request{Amount: 2, MemoryBytes: 8_000_999_999, Units: 101}
)

// other is a client that needs no shell, with a command line of its own.
var other = Client{
	Version: "1", OS: "any", Root: "/bitfusion/other", Binary: "/bitfusion/other/bin/gpurun",
	Command: CommandForm{
		Percent:   []string{"--gpus=${amount}", "--share", "${percent}%", "--units=${units}"},
		Memory:    []string{"--gpus=${amount}", "--mb", "${megabytes}"},
		Filter:    []string{"--where", "${filter}"},
		Separator: []string{"--"},
	},
}

func TestCommandsBehindTheClient(t *testing.T) {
	const bin450 = root450 + "/usr/bin/bitfusion"
	const bin250 = "/bitfusion/bitfusion-client-ubuntu1804_2.5.1-13/usr/bin/bitfusion"
	bash := func(text string, more ...string) []string { return append([]string{"/bin/bash", "-c", text}, more...) }
	c450, c350, c250 := client(t, "450", "ubuntu18"), client(t, "350", "ubuntu18"), client(t, "250", "ubuntu18")
	p450 := bin450 + " run -n 1 -p 0.500000  -- "
	tests := map[string]struct {
		client        *Client // 450 when nil
		request       Request // half when empty
		filters       []string
		command, args []string
		want          []string
	}{
		"a list of words": {command: []string{"python", "x.py", "-c", "z"}, want: bash(p450 + "python x.py -c z")},
		"words of args follow (W10)": {command: []string{"python"}, args: []string{"x.py", "a b"},
			want: bash(p450 + "python x.py 'a b'")},
		"-c of other programs stays (W9)": {command: []string{"python", "-c", "print('hi')"},
			want: bash(p450 + `python -c 'print('\''hi'\'')'`)},
		"a shell's text, quoted (W9)": {command: []string{"sh", "-c", "a && b"}, want: bash(p450 + "sh -c 'a && b'")},
		"env (W9)": {command: []string{"/usr/bin/env", "bash", "-c", "a; b"},
			want: bash(p450 + "/usr/bin/env bash -c 'a; b'")},
		"empty words, quotes and lines": {command: []string{"a", "", "'", "\n", "$X", "`id`"},
			want: bash(p450 + "a '' ''\\''' '\n' '$X' '`id`'")},
		"a name that begins as the client's": {command: []string{"bitfusion_train.py"}, want: bash(p450 + "bitfusion_train.py")}, // W12
		"text that begins as the client's":   {command: []string{"bitfusion_train.py --x"}, want: bash(p450 + "bitfusion_train.py --x")},
		"a word of shell signs is a word":    {command: []string{"a;b"}, want: bash(p450 + "'a;b'")},
		"simple text": {command: []string{"python x.py  --a=$HOME *.txt"},
			want: bash(p450 + "python x.py  --a=$HOME *.txt")},
		"simple text given to bash": {command: []string{"bash", "-c", "python x.py"}, want: bash(p450 + "python x.py")},
		"the same, its text in args": {command: []string{"/bin/bash", "-c"}, args: []string{"python x.py"},
			want: bash(p450 + "python x.py")},
		"blanks and comments around it": {command: []string{"\n# first\n  python x.py # more\n"}, want: bash(p450 + "python x.py")},
		"one command and a semicolon":   {command: []string{"python x.py;"}, want: bash(p450 + "python x.py")},
		"text over several lines":       {command: []string{"python \\\n  x.py"}, want: bash(p450 + "python \\\n  x.py")},
		"simple text with args": {command: []string{"python x.py"}, args: []string{"--b", "c d;"},
			want: bash(p450 + "python x.py --b 'c d;'")},
		"the same with a comment": {command: []string{"python x.py # it\n"}, args: []string{"c"},
			want: bash(p450 + "python x.py c")},
		"two commands": {command: []string{"cd /x && python x.py"},
			want: bash(p450 + "/bin/bash -c 'cd /x && python x.py'")},
		"two lines": {command: []string{"python x.py\npython y.py"},
			want: bash(p450 + "/bin/bash -c 'python x.py\npython y.py'")},
		"a pipe": {command: []string{"python x.py | tee log"},
			want: bash(p450 + "/bin/bash -c 'python x.py | tee log'")},
		"output to a file": {command: []string{"python x.py > log"},
			want: bash(p450 + "/bin/bash -c 'python x.py > log'")},
		"in the background":          {command: []string{"python x.py &"}, want: bash(p450 + "/bin/bash -c 'python x.py &'")},
		"negated":                    {command: []string{"! python x.py"}, want: bash(p450 + "/bin/bash -c '! python x.py'")},
		"a variable before":          {command: []string{"A=1 python x.py"}, want: bash(p450 + "/bin/bash -c 'A=1 python x.py'")},
		"what the shell does itself": {command: []string{"exec python x.py"}, want: bash(p450 + "/bin/bash -c 'exec python x.py'")},
		"the same with args": {command: []string{"exec python x.py"}, args: []string{"a b"},
			want: bash(p450 + `/bin/bash -c 'exec python x.py "$@"' bash 'a b'`)},
		"a loop": {command: []string{"for i in 1 2; do python x.py; done"},
			want: bash(p450 + "/bin/bash -c 'for i in 1 2; do python x.py; done'")},
		"time": {command: []string{"time python x.py"}, want: bash(p450 + "/bin/bash -c 'time python x.py'")},
		"another command inside": {command: []string{"python `which x.py`"},
			want: bash(p450 + "/bin/bash -c 'python `which x.py`'")},
		"another program's output as a file": {command: []string{"python <(python y.py)"},
			want: bash(p450 + "/bin/bash -c 'python <(python y.py)'")},
		"a program only the shell knows": {command: []string{"$PYTHON x.py"}, want: bash(p450 + "/bin/bash -c '$PYTHON x.py'")},
		"text that is no shell text":     {command: []string{"python 'x.py"}, want: bash(p450 + `/bin/bash -c 'python '\''x.py'`)},
		"text of blanks":                 {command: []string{" "}, want: bash(p450 + "/bin/bash -c ' '")},
		"$(NAME) in a word": {command: []string{"python", "$(ARGS)"},
			want: bash(p450+`"$@"`, "bash", "python", "$(ARGS)")},
		"$(NAME) in args": {command: []string{"python x.py"}, args: []string{"$(ARGS)"},
			want: bash(p450+`"$@"`, "bash", "python", "x.py", "$(ARGS)")},
		"$(NAME) in args, text for a shell": {command: []string{"python $HOME"}, args: []string{"$(ARGS)"},
			want: bash(p450+`"$@"`, "bash", "/bin/bash", "-c", `python $HOME "$@"`, "bash", "$(ARGS)")},
		"$(NAME) in text": {command: []string{"python x.py $(ARGS)"},
			want: bash(p450+`"$@"`, "bash", "/bin/bash", "-c", "python x.py $(ARGS)")},
		"$(NAME) in text, with args": {command: []string{"python $(X)"}, args: []string{"a"},
			want: bash(p450+`"$@"`, "bash", "/bin/bash", "-c", `python $(X) "$@"`, "bash", "a")},
		"$$ in text, of which kubelet makes $": {
			command: []string{`python $$'\'"';id;'"`}, want: bash(p450 + `/bin/bash -c 'python $$'\''\'\''"'\'';id;'\''"'`),
		},
		"more than one element may hold": {
			command: []string{"python", strings.Repeat("a", 60<<10), strings.Repeat("b", 60<<10)},
			want:    bash(p450+`"$@"`, "bash", "python", strings.Repeat("a", 60<<10), strings.Repeat("b", 60<<10)),
		},

		"memory, MB rounded down": {request: memory, command: []string{"python x.py"},
			want: bash(bin450 + " run -n 2 -m 8000 -- python x.py")},
		"memory and a filter": {request: memory, filters: []string{"device.id=0"}, command: []string{"python x.py"},
			want: bash(bin450 + " run -n 2 -m 8000   --filter device.id=0 -- python x.py")},
		"a filter with a blank (W13)": {filters: []string{"device.name=Tesla T4"}, command: []string{"python x.py"},
			want: bash(bin450 + " run -n 1 -p 0.500000  --filter 'device.name=Tesla T4' -- python x.py")},
		"1 percent": {request: Request{Amount: 1, Percent: 1}, command: []string{"a"},
			want: bash(bin450 + " run -n 1 -p 0.010000  -- a")},
		"100 percent": {request: Request{Amount: 1, Percent: 100}, command: []string{"a"},
			want: bash(bin450 + " run -n 1 -p 1.000000  -- a")},
		"3.5": {client: c350, command: []string{"python x.py"},
			want: bash("/bitfusion/bitfusion-client-ubuntu1804_3.5.0-5_amd64.deb/usr/bin/bitfusion run -n 1 -p 0.500000  -- python x.py")},
		"2.5, as the guides show it": {client: c250, command: []string{"python /b/x.py --model=inception3"},
			want: bash(bin250 + " run -n 1 -p 0.500000 python /b/x.py --model=inception3")},
		"2.5, memory": {client: c250, request: memory, command: []string{"python x.py"},
			want: bash(bin250 + " run -n 2 -m 8000 python x.py")},
		"2.5, text of two commands": {client: c250, command: []string{"a && b"},
			want: bash(bin250 + " run -n 1 -p 0.500000 /bin/bash -c 'a && b'")},
		"2.5, $(NAME)": {client: c250, command: []string{"a", "$(B)"}, want: bash(bin250+` run -n 1 -p 0.500000 "$@"`,
			"bash", "a", "$(B)")},
		"another client": {client: &other, command: []string{"python", "$(X) y"},
			want: []string{"/bitfusion/other/bin/gpurun", "--gpus=1", "--share", "50%", "--units=50", "--", "python", "$(X) y"}},
		"another client, memory, filters": {client: &other, request: memory, filters: []string{"a=1", "b=2"}, command: []string{"python"},
			args: []string{""}, want: []string{"/bitfusion/other/bin/gpurun", "--gpus=2", "--mb", "8000", "--where", "a=1", "--where",
				"b=2", "--", "python", ""}},
		"another client, simple text": {client: &other, command: []string{`python 'a b' "c"d`}, args: []string{"e f"},
			want: []string{"/bitfusion/other/bin/gpurun", "--gpus=1", "--share", "50%", "--units=50", "--", "python", "a b", "cd", "e f"}},
		"another client, text of a shell": {client: &other, command: []string{"python $HOME"}, want: []string{"/bitfusion/other/bin/gpurun",
			"--gpus=1", "--share", "50%", "--units=50", "--", "/bin/sh", "-c", "python $HOME"}},
		"another client, a list for bash": {client: &other, command: []string{"/bin/bash", "-c", "a b"},
			want: []string{"/bitfusion/other/bin/gpurun", "--gpus=1", "--share", "50%", "--units=50", "--", "/bin/bash", "-c", "a b"}},
		"% in a path (W26)": {
			client:  &Client{Binary: "/bitfusion/a%d%s/bitfusion", Command: namedForm(formBitfusion)},
			command: []string{"a%d"}, want: bash("/bitfusion/a%d%s/bitfusion run -n 1 -p 0.500000  -- a%d"),
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.client == nil {
				tt.client = c450
			}
			if tt.request == (Request{}) {
				tt.request = half
			}
			command, args := slices.Clone(tt.command), slices.Clone(tt.args)
			got, gotArgs, called, err := tt.client.Wrap(tt.request, tt.filters, command, args)
			if err != nil || called || gotArgs != nil || !slices.Equal(got, tt.want) {
				t.Fatalf("got  %q %q, called %v, error %v\nwant %q", got, gotArgs, called, err, tt.want)
			}
			if !slices.Equal(command, tt.command) || !slices.Equal(args, tt.args) {
				t.Error("the container's own command was changed")
			}
			// What the webhook wrote is left alone when it is called again.
			again, gotArgs, called, err := tt.client.Wrap(tt.request, tt.filters, got, nil)
			if err != nil || !called || len(gotArgs) > 0 || !slices.Equal(again, got) {
				t.Errorf("once more: %q %q, called %v, error %v", again, gotArgs, called, err)
			}
		})
	}
}

// Guards W12: a full path is recognised, a longer name is not.
func TestCommandsThatCallTheClient(t *testing.T) {
	c := client(t, "450", "ubuntu18")
	for _, command := range [][]string{
		{"bitfusion", "run", "-n", "1", "python"}, {c.Binary, "list_gpus"}, {"bitfusion"},
		{"bitfusion run -n 1 -- python x.py"}, {c.Binary + " run -n 1 python x.py && echo done"}, {"exec bitfusion run"},
		{"LD_LIBRARY_PATH=/x bitfusion run python"}, {`"bitfusion" run`}, {"bitfusion 'run"},
		{"/bin/bash", "-c", "bitfusion run -n 1 python"}, {"sh", "-c", c.Binary + " run", "sh", "x"}, {"bash", "-lc", "bitfusion run"},
		{"bash", "--norc", "-eo", "pipefail", "-c", "exec bitfusion run"}, {"dash", "-c", "bitfusion list_gpus | sort"},
	} {
		got, args, called, err := c.Wrap(half, nil, command, []string{"a b"})
		if err != nil || !called || !slices.Equal(got, command) || !slices.Equal(args, []string{"a b"}) {
			t.Errorf("%q: %q %q, called %v, error %v", command, got, args, called, err)
		}
	}
	for _, command := range [][]string{
		{"bitfusion_train.py"}, {"bitfusion-x run"}, {"python", "bitfusion"}, {"python bitfusion"}, {"bash", "-c", "echo bitfusion"},
		{"python", "-c", "bitfusion run"}, {"bash", "bitfusion"}, {"$bitfusion run"},
		{"bash", "-e", "bitfusion"}, {"bash", "-c"}, {"sh"}, {"bash", "-x", "-c", "python bitfusion"},
	} {
		if _, _, called, err := c.Wrap(half, nil, command, nil); err != nil || called {
			t.Errorf("%q: called %v, error %v", command, called, err)
		}
	}
}

func TestCommandsThatCannotBeWrapped(t *testing.T) {
	c450, c350, c250 := client(t, "450", "ubuntu18"), client(t, "350", "centos7"), client(t, "250", "ubuntu18")
	percentOnly := Client{Version: "1", OS: "any", Binary: "/bitfusion/a/b", Command: CommandForm{Percent: []string{"run"}}}
	tests := map[string]struct {
		client        *Client
		request       Request
		filters       []string
		command, args []string
		says          string
	}{
		"no command (W11)": {client: c450, request: half, args: []string{"a"}, says: "the container has no command"},
		"a NUL":            {client: c450, request: half, command: []string{"a\x00b"}, says: "NUL"},
		"a NUL in args":    {client: c450, request: half, command: []string{"a"}, args: []string{"\x00"}, says: "NUL"},
		"text of two, and args": {client: c450, request: half, command: []string{"a && b"}, args: []string{"--x"},
			says: `["/bin/bash", "-c", "TEXT", "NAME"]`},
		"a redirection, and args": {client: c450, request: half, command: []string{"a > b"}, args: []string{"--x"},
			says: "args (\"--x\"...) belong to none of them"},
		"a backslash, and args": {client: c450, request: half, command: []string{`a b\`}, args: []string{"--x"},
			says: "write the arguments in the text"},
		"an option for the client": {client: c250, request: half, command: []string{"--filter", "x"}, says: `begins with "--filter"`},
		"the same as text":         {client: c250, request: half, command: []string{"-p 1.0 python"}, says: `begins with "-p"`},
		"filters before 4.0": {client: c350, request: half, filters: []string{"device.id=0"}, command: []string{"a"},
			says: "annotation bitfusion-client/filter: client 350 for centos7 does not support filters; remove it, or select another " +
				"version with annotation bitfusion-client/version"},
		"a kind that it lacks": {client: &percentOnly, request: memory, command: []string{"a"},
			says: "bitfusion.io/gpu-memory: client 1 for any does not support requests of this kind; use bitfusion.io/gpu-percent"},
		"a request not checked": {client: c450, command: []string{"a"}, says: "the request was not validated"},
		"percent that nobody has": {client: c450, request: Request{Amount: 1, Percent: 101}, command: []string{"a"},
			says: "the request was not validated"},
		"memory of less than 1 MB": {client: c450, request: Request{Amount: 1, MemoryBytes: 1}, command: []string{"a"},
			says: "the request was not validated"},
		"text too long to be known": {client: c450, request: half, command: []string{"a " + strings.Repeat("b ", maxParsed)},
			args: []string{"c"}, says: "write the arguments in the text"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, _, called, err := tt.client.Wrap(tt.request, tt.filters, tt.command, tt.args)
			if err == nil || called || got != nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%q, called %v, error %v, want %q", got, called, err, tt.says)
			}
		})
	}
}

// stage is a folder with programs for commands to run in.
type stage struct {
	dir    string
	client Client
	bash   string
}

// newStage makes a stand-in for the client that prints its arguments, each ended
// by NUL. With runs set it runs the command instead, with the variable BEHIND.
func newStage(t testing.TB, runs bool) *stage {
	t.Helper()
	bash := "/bin/bash"
	if _, err := os.Stat(bash); err != nil {
		t.Skip("there is no " + bash)
	}
	s := &stage{dir: t.TempDir(), bash: bash}
	text := "printf '%s\\0' \"$@\"\n"
	if runs {
		text = "while test \"$1\" != --; do shift; done; shift\nBEHIND=yes exec \"$@\"\n"
	}
	s.write(t, "bitfusion", text)
	s.client = Client{Version: "x", OS: "y", Binary: filepath.Join(s.dir, "bitfusion"), Command: namedForm(formBitfusion)}
	return s
}

func (s *stage) write(t testing.TB, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte("#!"+s.bash+"\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// run runs a command as kubelet would and returns what it printed.
func (s *stage) run(t testing.TB, command, env []string) string {
	t.Helper()
	expanded := make([]string, len(command))
	for i, element := range command {
		expanded[i] = kubelet(element, env)
	}
	work := filepath.Join(s.dir, "work")
	if err := os.MkdirAll(work, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.Background(), expanded[0], expanded[1:]...)
	cmd.Dir, cmd.Env = work, append([]string{"PATH=" + s.dir, "LC_ALL=C.UTF-8", "HOME=/h"}, env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%q: %v\n%s", expanded, err, &errs)
	}
	left, err := os.ReadDir(work)
	if err != nil || len(left) > 0 {
		t.Fatalf("%q left files: %v, %v", expanded, left, err)
	}
	return out.String()
}

// kubelet replaces $(NAME) in an element as kubelet does, see
// k8s.io/kubernetes/third_party/forked/golang/expansion.
func kubelet(s string, env []string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		i++
		switch s[i] {
		case '$':
			b.WriteByte('$')
		case '(':
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				b.WriteString("$(")
				continue
			}
			name := s[i+1 : i+end]
			j := slices.IndexFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
			if j < 0 {
				b.WriteString("$(" + name + ")")
			} else {
				b.WriteString(env[j][len(name)+1:])
			}
			i += end
		default:
			b.WriteByte('$')
			b.WriteByte(s[i])
		}
	}
	return b.String()
}

// Shell text does behind the client what it does without, and all of it: every
// program in it is started behind the client. Guards W9.
func TestShellTextDoesTheSameBehindTheClient(t *testing.T) {
	s := newStage(t, true)
	s.write(t, "python", "printf 'python %s' \"$BEHIND\"; printf '<%s>' \"$@\"; echo\n")
	s.write(t, "tee", "printf 'tee %s:' \"$BEHIND\"; read -r line; echo \"$line\"\n")
	s.write(t, "bash", "BEHIND=$BEHIND exec "+s.bash+" \"$@\"\n")
	s.client.Binary = filepath.Join(s.dir, "bitfusion")
	env := []string{"ARGS=--a 'b c' ; python injected", "WORD=w", "EMPTY="}
	for _, text := range []string{
		"python x.py --a=1", "python x.py; python y.py", "python a && python b", "false || python b", "python x | tee log",
		"for i in 1 2 3; do python $i; done", "if true; then python a; else python b; fi",
		"python $WORD \"$WORD\" '$WORD' $EMPTY \"$EMPTY\"",
		"python $(python inner)", "python `python inner`", "python $(ARGS)", "python \"$(WORD)\" $$(WORD)", "python $$ | tee x",
		"exec python x", "A=1 python $A", "! python x || true", "python \\\n  x.py", "\n# comment\npython a # b\n", "python a;",
		"python a\npython b\n",
		"cd / && python $PWD", "time -p python x 2>&1 | tee z", "python ~ ~/x {a,b} a\\ b 'it'\\''s' \"a\\\"b\"", "python $'a\\nb'",
		"python 'a\nb'",
		"f() { python \"$@\"; }; f 1 2", "(python sub)", "{ python group; }", "python \"é ☃\"", "python <<EOF\nx\nEOF\n",
		"python $((1+2)) ${WORD:-x} ${#WORD}",
		"[[ a == a ]] && python y", "export A=5; python $A", "python *", "python -- -x --", "echo hi", "\tpython x",
		"test -n \"$WORD\" && python set", `python $$'\'"';python z; #"`, "python '$(WORD)' '\\' \"\\\\\"",
	} {
		plain := []string{s.bash, "-c", text}
		want := s.run(t, plain, append(env, "BEHIND=yes"))
		for _, command := range [][]string{{text}, plain, {"bash", "-c", text}} {
			wrapped, args, called, err := s.client.Wrap(half, nil, command, nil)
			if err != nil || called || args != nil {
				t.Errorf("%q: args %q, called %v, error %v", command, args, called, err)
				continue
			}
			if got := s.run(t, wrapped, env); got != want && !strings.HasPrefix(text, "time") {
				t.Errorf("%q\ngot  %q\nwant %q\nby   %q", command, got, want, wrapped)
			}
		}
	}
}

// The words of a container's command reach the client as they are, whatever is in
// them. Guards W8, W9, W10 and W13.
func FuzzWrapWords(f *testing.F) {
	for _, seed := range []string{
		"python\x1fx.py", "a\x1f\x1f\x1f", "a\x1f'\x1f\"\x1f\\", "a\x1f$(X)\x1f$(Y)", "a\x1f$$(X)\x1f$$$(X)\x1f$",
		"a\x1f;touch x\x1f`touch x`\x1f$(touch x)",
		"a\x1f'; touch x; '\x1f\n\r\t", "a b\x1fc", "é☃\x1f\xff\xfe", "sh\x1f-c\x1ftouch x && b", "bash\x1f-c\x1f\x1fx",
		"a\x1f~\x1f*\x1f{a,b}\x1f#c\x1f!x", "$(Z)\x1f$(Z)",
		"a\x1f$'\\x41'\x1f$\"x\"\x1f'$(X)'", "=x\x1fa=b\x1f-n\x1f--", "a\x1f$(X", "\x1fa", "bitfusion\x1frun",
		"a\x1f&\x1f|\x1f>x\x1f<y\x1f(\x1f)",
	} {
		f.Add(seed, uint8(1), false)
		f.Add(seed, uint8(0), true)
	}
	env := []string{"X=a' b; touch x; $(touch x) `touch x`", "Y=", "Z=z"}
	f.Fuzz(func(t *testing.T, joined string, split uint8, old bool) {
		elements := strings.Split(joined, "\x1f")
		if strings.Contains(joined, "\x00") || len(joined) > 1<<16 {
			return // kubelet could not start it
		}
		n := 1 + int(split)%len(elements)
		command, args := elements[:n], elements[n:]
		if len(command) == 1 && strings.ContainsAny(command[0], " \t\n") {
			return // shell text, see FuzzWrapText
		}
		s := newStage(t, false)
		head := []string{"run", "-n", "1", "-p", "0.500000", "--filter", "device.name=Tesla T4", "--"}
		filters := []string{"device.name=Tesla T4"}
		if old {
			s.client.Command = namedForm(formBitfusion2)
			head, filters = head[:5], nil
		}
		wrapped, rest, called, err := s.client.Wrap(half, filters, command, args)
		switch {
		case err != nil:
			if !old || !strings.HasPrefix(command[0], "-") && !strings.HasPrefix(command[0], "$(") &&
				(len(elements) != 3 || !strings.HasPrefix(elements[2], "-")) {
				t.Fatalf("%q %q: %v", command, args, err)
			}
			return
		case called:
			if !slices.Equal(wrapped, command) || !slices.Equal(rest, args) {
				t.Fatalf("%q %q became %q %q", command, args, wrapped, rest)
			}
			return
		case len(rest) > 0:
			t.Fatalf("%q are left of the arguments", rest)
		case len(elements) == 3 && (elements[0] == "bash" || elements[0] == "/bin/bash") && elements[1] == "-c":
			return // shell text, see FuzzWrapText
		}
		want := slices.Clone(head)
		for _, element := range elements {
			want = append(want, kubelet(element, env))
		}
		if slices.ContainsFunc(want, func(w string) bool { return strings.Contains(w, "\x00") }) {
			return // kubelet could not start it
		}
		if got := s.run(t, wrapped, env); got != strings.Join(want, "\x00")+"\x00" {
			t.Fatalf("by %q\ngot  %q\nwant %q", wrapped, got, strings.Join(want, "\x00")+"\x00")
		}
	})
}

// Of any text, either a shell behind the client gets all, or it is one command
// and the client gets its words; a shell before the client never does a part of
// it. The words that are known without a shell are those that a shell makes.
func FuzzWrapText(f *testing.F) {
	for _, seed := range []string{
		"python x.py", "a; b", "a && b # c", "a 'b c' \"d\"", "a\\ b c", "a $(b)", "a `b`", "a <(b)", "a $'b\\x41' $\"c\"", "a $'\\x41'",
		"a\\", "a \\\n b", "exec a b", "A=1 b c", "a 'b",
		"a \"$b\" ${c} $((d))", "a {b,c} * ? [d]", "a !b", "((((((", "a\r\nb", "# a b", "a ~/b ~", "a=b c", "bitfusion run", "a {fd}>b",
		"a $$'\\'\"';id;'\"", "a @(b)", "a \\\r\n b",
		"a b=~c", "select a in b", "coproc a b", "function a b", "[ a ] b", "a\x01b c", "\xffa b", "a é☃",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !strings.ContainsAny(text, " \t\n") || strings.Contains(text, "\x00") || len(text) > maxParsed {
			return // no shell text
		}
		c := Client{Binary: "/c/client", Command: namedForm(formBitfusion)}
		wrapped, _, called, err := c.Wrap(half, nil, []string{text}, nil)
		if err != nil || called {
			if called && !strings.Contains(text, "client") {
				t.Fatalf("called %v, error %v", called, err)
			}
			return
		}
		if len(wrapped) > 3 {
			if want := []string{"/bin/bash", "-c", `/c/client run -n 1 -p 0.500000  -- "$@"`,
				"bash", "/bin/bash", "-c", text}; !slices.Equal(wrapped, want) {
				t.Fatalf("got  %q\nwant %q", wrapped, want)
			}
			return
		}
		inner, ok := strings.CutPrefix(wrapped[2], "/c/client run -n 1 -p 0.500000  -- ")
		if !ok {
			t.Fatalf("%q", wrapped)
		}
		if inner == "/bin/bash -c "+Quote(text) {
			return
		}
		file, err := syntax.NewParser().Parse(strings.NewReader(wrapped[2]), "")
		if err != nil || len(file.Stmts) != 1 || len(file.Last) > 0 {
			t.Fatalf("%q is not one command: %v", wrapped[2], err)
		}
		call, ok := file.Stmts[0].Cmd.(*syntax.CallExpr)
		if !ok || len(call.Assigns)+len(file.Stmts[0].Redirs) > 0 || file.Stmts[0].Background || len(call.Args) < 8 || substitutes(call) {
			t.Fatalf("%q is more than one command", wrapped[2])
		}
		words := parseText(text, true).words
		if words == nil {
			return
		}
		s := newStage(t, false)
		wrapped, _, called, err = s.client.Wrap(half, nil, []string{text}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if called {
			return
		}
		want := strings.Join(append([]string{"run", "-n", "1", "-p", "0.500000", "--"}, words...), "\x00") + "\x00"
		if got := s.run(t, wrapped, nil); got != want {
			t.Fatalf("by %q\ngot  %q\nwant %q", wrapped, got, want)
		}
	})
}

// Hostile text costs neither much time nor the stack.
func TestHostileTextIsBounded(t *testing.T) {
	c := client(t, "450", "ubuntu18")
	for _, piece := range []string{"(", "$(", "${a", "`", "\\`", "{ ", "a |", "<(", "$((", "\"$(", "[[ ", "if ", "case ", "a <<E\n",
		"((", "! ", "a[", "\"${a:-", "$[", "@(", "\\"} {
		for _, n := range []int{200, maxParsed, 1 << 20} {
			text := "a " + strings.Repeat(piece, n/len(piece))
			if _, _, _, err := c.Wrap(half, nil, []string{text}, nil); err != nil {
				t.Errorf("%q: %v", short(text), err)
			}
		}
	}
}

func BenchmarkParseRequestAndWrap(b *testing.B) {
	c, err := DefaultCatalog().Find("450", "ubuntu18")
	if err != nil {
		b.Fatal(err)
	}
	resources := limits("amount", "2", "memory", "8000M")
	for name, command := range map[string][]string{
		"text": {"python /benchmark/scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py --local_parameter_device=gpu --batch_size=32 " +
			"--model=inception3"},
		"words": {"python", "/benchmark/scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py", "--local_parameter_device=gpu", "--batch_size=32"},
		"shell": {"/bin/bash", "-c", "cd /benchmark && python tf_cnn_benchmarks.py --batch_size=32 | tee log"},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r, err := ParseRequest(resources, 16000)
				if err != nil {
					b.Fatal(err)
				}
				filters, err := ParseFilter("server.hostname=bf-server server.addr=192.168.1.1")
				if err != nil {
					b.Fatal(err)
				}
				if _, _, _, err := c.Wrap(r, filters, command, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
