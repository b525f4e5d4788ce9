package schedconf

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// flagConfig names what a scheduler is configured by. It is the flag that Wire sets, and
// that AnnotationBefore remembers.
const flagConfig = "config"

// A source is the file that a scheduler has its configuration from: path in the
// container, host on the node. Both are empty when there is none.
type source struct {
	path, host string
}

type scheduler struct {
	in      Input
	pod     *pod
	version version
	// before is the command line as it was before it was wired.
	before command
	source source
	// target is the file of ours on the node.
	target string
	// wired is set when the manifest names target and was annotated by Wire.
	wired bool
	// current is what target holds; nil when there is no such file.
	current []byte
}

func (in Input) dir() string {
	if in.ConfigDir == "" {
		return "/etc/kubernetes"
	}
	return path.Clean(in.ConfigDir)
}

// ours are files on the node, the one that Wire writes first.
func (in Input) ours() []string {
	out := []string{path.Join(in.dir(), ConfigFile)}
	for _, name := range FormerFiles {
		out = append(out, path.Join(in.dir(), name))
	}
	return out
}

// read returns a file of the node, nil when there is none.
func (in Input) read(file string) ([]byte, error) {
	if in.ReadFile == nil {
		return nil, nil
	}
	data, err := in.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	if data == nil {
		data = []byte{}
	}
	return data, nil
}

func find(in Input) (*scheduler, error) {
	p, err := readPod(in.ManifestPath, in.Manifest)
	if err != nil {
		return nil, err
	}
	s := &scheduler{in: in, pod: p}
	if s.version, err = p.version(in); err != nil {
		return nil, err
	}
	if s.before, err = p.before(in); err != nil {
		return nil, err
	}
	if s.source, err = p.source(s.before); err != nil {
		return nil, err
	}
	s.target = in.ours()[0]
	// A manifest that is wired already keeps its file.
	if t := p.target(in); t.host != "" && p.annotation(AnnotationHash) != "" {
		s.target, s.wired = t.host, true
	}
	s.current, err = in.read(s.target)
	return s, err
}

// before returns the command line as it was before the manifest was wired.
func (p *pod) before(in Input) (command, error) {
	c := p.command
	was, err := p.remembered()
	if err != nil || was == nil || p.target(in).host == "" {
		return c, err
	}
	c.flags = slices.DeleteFunc(slices.Clone(c.flags), func(f option) bool { return f.name == flagConfig })
	if *was != "" {
		c.flags = append(c.flags, option{name: flagConfig, value: *was})
	}
	return c, nil
}

// remembered returns the value of --config that was replaced, empty when there was
// none; nil when the manifest is not wired.
func (p *pod) remembered() (*string, error) {
	if p.annotation(AnnotationHash) == "" {
		return nil, nil
	}
	var was string
	text := p.annotation(AnnotationBefore)
	if text == "" {
		return &was, nil
	}
	var flags []string
	if err := json.Unmarshal([]byte(text), &flags); err != nil {
		return nil, p.doc.errorf("annotation %s: not a JSON list of flags: %w", AnnotationBefore, err)
	}
	for _, f := range flags {
		value, ok := strings.CutPrefix(f, "--"+flagConfig+"=")
		if !ok {
			return nil, p.doc.errorf("annotation %s: %q is not the replaced flag", AnnotationBefore, f)
		}
		was = value
	}
	return &was, nil
}

// source finds where the scheduler has its configuration from.
func (p *pod) source(c command) (source, error) {
	f, _ := c.flag(flagConfig)
	switch {
	case f.unclear != "":
		return source{}, p.doc.errorf("--%s cannot be determined: %s; set it explicitly", flagConfig, f.unclear)
	case f.value == "":
		return source{}, nil
	case strings.HasSuffix(f.value, "/"):
		return source{}, p.doc.errorf("--%s=%s is a folder", flagConfig, f.value)
	}
	host, err := p.hostPath(flagConfig, f.value)
	return source{path: f.value, host: host}, err
}

// edited reports whether our file was changed by somebody else since it was made.
func (s *scheduler) edited() bool {
	return s.wired && s.current != nil && digest(madeByUs, s.current) != s.pod.annotation(AnnotationHash)
}

// adopted reports whether the scheduler uses a file of our name that nothing says
// to be ours: GCUShare's config manager took the same names, and what was edited
// by hand stays when the extender is taken out.
func (s *scheduler) adopted() bool { return !s.wired && s.source.host == s.target && s.current != nil }

// base returns the configuration that the extender is to be put into, how its
// digest begins, and what there is to say about it.
func (s *scheduler) base() (*config, string, []string, error) {
	switch {
	case s.edited():
		c, err := readConfig(s.target, s.current)
		if err != nil {
			err = fmt.Errorf("%w; it was edited after it was created: fix it, or remove it to have it created again", err)
		}
		return c, editedByOthers, []string{s.target + " was edited after it was created; the edits are kept."}, err
	case s.adopted():
		c, err := readConfig(s.target, s.current)
		if err != nil {
			return nil, "", nil, err
		}
		if rest, err := readConfig(s.target, s.current); err == nil && rest.strip() == nil {
			if made, notes, err := s.replacement(rest); err == nil && made != nil {
				return made, madeByUs, append(notes, "Replaced "+s.target+", which contained only the extender."), nil
			}
		}
		return c, editedByOthers, []string{s.target + " already exists; the extender is added to it."}, nil
	}
	c, notes, err := s.former()
	return c, madeByUs, notes, err
}

// replacement returns what Wire would make of the command line alone when that has all of
// a configuration without the extender, and nil otherwise.
func (s *scheduler) replacement(c *config) (*config, []string, error) {
	made, notes, err := generate(s.target, s.before)
	if err != nil || !c.within(made) {
		return nil, nil, err
	}
	return made, notes, nil
}

// former returns the configuration that the scheduler had, or would have had,
// without us.
func (s *scheduler) former() (*config, []string, error) {
	if s.source.host == "" {
		c, notes, err := generate(s.target, s.before)
		if err != nil {
			return nil, nil, s.pod.doc.errorf("%w", err)
		}
		return c, notes, nil
	}
	data, err := s.in.read(s.source.host)
	if err != nil {
		return nil, nil, err
	}
	if data == nil && s.wired && s.current != nil {
		c, err := readConfig(s.target, s.current)
		return c, []string{fmt.Sprintf("%s no longer exists; only %s is left.", s.source.host, s.target)}, err
	}
	if data == nil {
		return nil, nil, s.pod.doc.errorf("--%s=%s: file %s does not exist on the node", flagConfig, s.source.path, s.source.host)
	}
	c, err := readConfig(s.source.host, data)
	if err != nil {
		return nil, nil, err
	}
	if s.source.host == s.target {
		return c, nil, nil
	}
	c.copied = true
	return c, []string{"The configuration is a copy of " + s.source.host + ", with the extender added."}, nil
}

// madeBy begins the comment in front of what Wire makes.
const madeBy = "# Made by divvy-control schedconf"

func (c *config) bytes() ([]byte, error) {
	text, err := c.doc.bytes()
	if err != nil {
		return nil, err
	}
	if c.copied {
		text = append([]byte(madeBy+": a copy of "+c.doc.name+" with an extender put in.\n"+
			"# What is changed there is taken over; `divvy-control schedconf uninstall` goes back to it.\n"),
			bytes.TrimPrefix(text, []byte("\ufeff"))...)
	}
	return text, nil
}

// How AnnotationHash begins: by it a later run knows whether it may make the
// configuration anew, or has to keep what is in it.
const (
	madeByUs       = "made-"
	editedByOthers = "edited-"
)

// digest returns what AnnotationHash holds. It begins with a word, as a row of
// digits could be a number.
func digest(kind string, data []byte) string {
	sum := sha256.Sum256(data)
	return kind + hex.EncodeToString(sum[:16])
}

// Wire returns what makes the scheduler consult the extender. It is idempotent:
// for a scheduler that does so already, the Change is empty; an entry of ours
// with other values (URL, CA, resources) is brought up to date, and so is our
// copy of a configuration that was changed since.
//
// It fails, and nothing is to be changed, when the manifest is not that of one
// kube-scheduler from 1.29 on, when what it is configured by cannot be read or
// has a version that it does not serve, and when another extender binds pods or
// manages a resource of this one, which kube-scheduler does not allow.
func Wire(in Input, e Extender) (Change, error) {
	if err := e.check(); err != nil {
		return Change{}, err
	}
	s, err := find(in)
	if err != nil {
		return Change{}, err
	}
	c, kind, notes, err := s.base()
	if err != nil {
		return Change{}, err
	}
	if err := c.checkVersion(); err != nil {
		return Change{}, err
	}
	if err := c.add(e); err != nil {
		return Change{}, err
	}
	content, err := c.bytes()
	if err != nil {
		return Change{}, err
	}
	if now, err := parse(s.current); s.wired && err == nil {
		if made, err := parse(content); err == nil && covers(now, made) {
			content = s.current // in the layout of another release perhaps, which is no reason for a restart
		}
	}
	if err := s.wire(s.pod, digest(kind, content)); err != nil {
		return Change{}, err
	}
	files := []File{s.pod.file(s.target, content)}
	if e.Program != nil {
		key, more, err := s.replace(s.pod, c, e.Program)
		if err != nil {
			return Change{}, err
		}
		files, notes = append(files, key), append(notes, more...)
	}
	manifest, err := s.pod.doc.bytes()
	if err != nil {
		return Change{}, err
	}
	if s.version > newest {
		notes = append(notes, fmt.Sprintf("kube-scheduler %v is newer than the latest known version %v and is treated like it.", s.version,
			newest))
	}
	change := Change{Manifest: manifest, Notes: notes}
	for _, file := range files {
		now, err := in.read(file.Path)
		if err != nil {
			return Change{}, err
		}
		if now == nil || !bytes.Equal(now, file.Content) {
			change.Files = append(change.Files, file)
		}
	}
	return change, nil
}

func (p *pod) file(name string, content []byte) File {
	f := File{Path: name, Content: content, Mode: 0o644}
	f.UID, f.GID = p.owner()
	if bytes.Contains(bytes.ToLower(content), []byte("keydata")) {
		f.Mode = 0o600
	}
	return f
}

// wire puts into a manifest what makes the scheduler read our file. It gives the
// same for a manifest that is wired and for the one that it was made from.
func (s *scheduler) wire(p *pod, hash string) error {
	was, err := p.remembered()
	if err != nil {
		return err
	}
	at, err := p.mount(s.target, "File")
	if err != nil {
		return err
	}
	before := p.annotation(AnnotationBefore)
	f, named := p.command.flag(flagConfig)
	if was == nil || f.value != at {
		before = ""
		if named && f.value != at {
			data, err := json.Marshal([]string{"--" + flagConfig + "=" + f.value})
			if err != nil {
				return p.doc.errorf("remember its flags: %w", err)
			}
			before = string(data)
		}
	}
	if err := p.setFlag(flagConfig, at); err != nil {
		return err
	}
	if err := p.annotate(AnnotationBefore, before); err != nil {
		return err
	}
	return p.annotate(AnnotationHash, hash)
}

// Unwire returns what takes the extender out again, and the files that are to be
// removed once the scheduler runs without them. The manifest becomes original,
// byte for byte, when nothing else was edited since original was wired;
// otherwise, and without an original (nil), just what was put in is taken out. A
// configuration of ours that was edited since, or whose original is gone, is kept in
// use, without the extender. A scheduler that is not wired needs no Change.
//
// Unlike Wire it does not need to know the version of the scheduler; it then
// takes what the manifest says.
func Unwire(in Input, original []byte) (Change, []string, error) {
	p, err := readPod(in.ManifestPath, in.Manifest)
	if err != nil {
		return Change{}, nil, err
	}
	change := Change{Manifest: in.Manifest}
	target := p.target(in)
	kept := ""
	ours, err := p.isOurs(in, target)
	if err != nil {
		return Change{}, nil, err
	}
	if !ours {
		kept = target.host // Somebody else's, GCUShare's for example.
	} else {
		c, notes, err := p.keep(in, target)
		if err != nil {
			return Change{}, nil, err
		}
		change.Notes = notes
		switch {
		case c != nil:
			kept = target.host
			change.Notes = append(change.Notes, fmt.Sprintf("%s %s; it stays in use, without the extender.", kept, c.why))
			content, err := c.bytes()
			if err != nil {
				return Change{}, nil, err
			}
			if !bytes.Equal(content, c.doc.text) {
				change.Files = []File{p.file(kept, content)}
			}
			if err := errors.Join(p.annotate(AnnotationBefore, ""), p.annotate(AnnotationHash, "")); err != nil {
				return Change{}, nil, err
			}
			change.Manifest, err = p.doc.bytes()
			if err != nil {
				return Change{}, nil, err
			}
		case p.wiredFrom(in, target, original):
			change.Manifest = original
		default:
			if err := p.unwire(in, target); err != nil {
				return Change{}, nil, err
			}
			if change.Manifest, err = p.doc.bytes(); err != nil {
				return Change{}, nil, err
			}
		}
	}
	var remove []string
	for _, file := range append(in.ours(), in.keyFile()) {
		if file == kept {
			continue
		}
		data, err := in.read(file)
		if err != nil {
			return Change{}, nil, err
		}
		if data != nil {
			remove = append(remove, file)
		}
	}
	return change, remove, nil
}

// target returns our file as the manifest names it; without host when it does
// not.
func (p *pod) target(in Input) source {
	f, ok := p.command.flag(flagConfig)
	if !ok {
		return source{}
	}
	if host, err := p.hostPath(flagConfig, f.value); err == nil && slices.Contains(in.ours(), host) {
		return source{path: f.value, host: host}
	}
	return source{}
}

// isOurs reports whether it was Wire that made a manifest use a file of our name.
// The annotation may be gone.
func (p *pod) isOurs(in Input, target source) (bool, error) {
	if p.annotation(AnnotationHash) != "" || p.program != "" {
		return true, nil
	}
	if target.host == "" {
		return false, nil
	}
	for _, m := range p.mounts {
		if m.host == target.host && strings.HasPrefix(m.volume, volumeName) {
			return true, nil
		}
	}
	data, err := in.read(target.host)
	return bytes.Contains(data, []byte(madeBy)), err
}

// kept is a configuration that stays in use, what it was before, and why.
type kept struct {
	*config
	why string
}

// keep returns our file without the extender when it has more in it than Wire
// put there, and nil when it can go.
func (p *pod) keep(in Input, target source) (*kept, []string, error) {
	if target.host == "" {
		return nil, nil, nil
	}
	data, err := in.read(target.host)
	if err != nil || data == nil {
		return nil, nil, err
	}
	s, unknown := find(in)
	why := "was edited after it was created"
	lost := s.lostSource()
	switch {
	case lost:
		why = fmt.Sprintf("is all that is left of %s, which no longer exists", s.source.host)
	case digest(madeByUs, data) == p.annotation(AnnotationHash):
		return nil, nil, nil
	}
	c, err := readConfig(target.host, data)
	if err != nil {
		return nil, []string{fmt.Sprintf("Not preserved: %v.", err)}, nil
	}
	if err := c.strip(); err != nil {
		return nil, nil, err
	}
	if unknown == nil && !lost {
		if s.adopted() || s.source.host == "" {
			if made, _, err := s.replacement(c); err == nil && made != nil {
				return nil, nil, nil
			}
		} else if former, _, err := s.former(); err == nil {
			if former.strip() == nil && sameReading(former.doc, c.doc) {
				return nil, nil, nil
			}
		}
	}
	return &kept{c, why}, nil, nil
}

// lostSource reports whether the file that ours is a copy of is not there any more.
func (s *scheduler) lostSource() bool {
	if s == nil || !s.wired || s.source.host == "" || s.source.host == s.target {
		return false
	}
	data, err := s.in.read(s.source.host)
	return data == nil && err == nil
}

func (p *pod) unwire(in Input, target source) error {
	was, err := p.remembered()
	if err != nil {
		return err
	}
	f, has := p.command.flag(flagConfig)
	switch {
	case target.host == "":
		// The scheduler was configured with another file since.
	case was != nil && *was != "":
		err = p.setFlag(flagConfig, *was)
	case has && f.value == target.path:
		err = p.dropFlag(flagConfig)
	}
	if err != nil {
		return err
	}
	for _, key := range []string{AnnotationHash, AnnotationBefore} {
		if err := p.annotate(key, ""); err != nil {
			return err
		}
	}
	named := p.target(in).host
	for _, file := range in.ours() {
		if file == named {
			continue
		}
		if err := p.unmountFile(file); err != nil {
			return err
		}
	}
	return nil
}

// wiredFrom reports whether the manifest is what wiring the original gives: it holds the
// same, and no comment that the original does not have. The layout may be that of another
// release.
func (p *pod) wiredFrom(in Input, target source, original []byte) bool {
	hash := p.annotation(AnnotationHash)
	if original == nil || hash == "" || target.host == "" {
		return false
	}
	o, err := readPod(in.ManifestPath, original)
	if err != nil || o.annotation(AnnotationHash) != "" && o.target(in).host != "" {
		return false
	}
	s := &scheduler{in: in, target: target.host, source: target}
	return s.wire(o, hash) == nil && covers(o.doc, p.doc)
}
