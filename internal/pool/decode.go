package pool

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	yaml "go.yaml.in/yaml/v3"
)

const (
	// MaxCatalog bounds a catalog, in bytes; a ConfigMap holds no more.
	MaxCatalog = 1 << 20
	// maxClients bounds its entries, maxWords the words of a command form and the
	// keys of a mapping, and maxMistakes what is reported.
	maxClients  = 1000
	maxWords    = 64
	maxMistakes = 50
)

// CatalogError lists everything that is wrong with a catalog, so that it can be
// mended in one go.
type CatalogError struct {
	// Mistakes are sentences that begin with the line, and mostly with the field,
	// that they are about.
	Mistakes []string
}

func (e *CatalogError) Error() string {
	if len(e.Mistakes) == 1 {
		return "client catalog: " + e.Mistakes[0]
	}
	return fmt.Sprintf("client catalog: %d mistakes:\n  %s", len(e.Mistakes), strings.Join(e.Mistakes, "\n  "))
}

// DecodeCatalog reads a catalog, in the present form or the original's, and
// checks it: unknown keys, missing fields, doubles, paths outside MountPath. All
// mistakes are reported at once, each with its place, in a *CatalogError.
func DecodeCatalog(data []byte) (*Catalog, error) {
	d := decoder{}
	c := d.catalog(data)
	if len(d.mistakes) == 0 {
		return c, nil
	}
	slices.SortStableFunc(d.mistakes, func(a, b mistake) int { return a.line - b.line })
	var e CatalogError
	for _, m := range d.mistakes {
		if len(e.Mistakes) == maxMistakes {
			e.Mistakes = append(e.Mistakes, fmt.Sprintf("and %d more", len(d.mistakes)-maxMistakes))
			break
		}
		e.Mistakes = append(e.Mistakes, m.text)
	}
	return nil, &e
}

// decoder collects the mistakes of a catalog.
type decoder struct{ mistakes []mistake }

// mistake is a sentence and the line that it is about, 0 for the whole file.
type mistake struct {
	line int
	text string
}

// wrong notes a mistake at a node.
func (d *decoder) wrong(n *yaml.Node, field, format string, args ...any) {
	m := fmt.Sprintf(format, args...)
	if field != "" {
		m = field + ": " + m
	}
	line := 0
	if n != nil && n.Line > 0 {
		line = n.Line
		m = fmt.Sprintf("line %d: %s", line, m)
	}
	d.mistakes = append(d.mistakes, mistake{line, m})
}

// catalog reads a file of either form.
func (d *decoder) catalog(data []byte) *Catalog {
	if len(data) > MaxCatalog {
		d.wrong(nil, "", "%d bytes; a catalog has at most %d", len(data), MaxCatalog)
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var root yaml.Node
	switch err := dec.Decode(&root); {
	case errors.Is(err, io.EOF) || err == nil && (len(root.Content) == 0 || isNull(root.Content[0])):
		d.wrong(nil, "", "it is empty; write apiVersion: %s, kind: %s and clients", APIVersion, Kind)
		return nil
	case err != nil:
		d.wrong(nil, "", "it is not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
		return nil
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		d.wrong(nil, "", "more than one YAML document; only one is supported")
		return nil
	}
	fields := d.mapping(root.Content[0], "", []string{"apiVersion", "kind", "defaults", "clients", "BitfusionClients"})
	if fields == nil {
		return nil
	}
	var c Catalog
	lines := map[*Client]*yaml.Node{}
	if original, ok := fields["BitfusionClients"]; ok {
		for _, key := range []string{"apiVersion", "kind", "defaults", "clients"} {
			if n, ok := fields[key]; ok {
				d.wrong(n, key, "this key and BitfusionClients belong to different formats; use one format")
			}
		}
		d.clients(&c, lines, original, "BitfusionClients", d.originalClient)
		d.doubles(&c, lines)
		return &c
	}
	d.constant(root.Content[0], fields, "apiVersion", APIVersion)
	d.constant(root.Content[0], fields, "kind", Kind)
	if n, ok := fields["clients"]; ok {
		d.clients(&c, lines, n, "clients", d.client)
	} else {
		d.wrong(root.Content[0], "clients", "the list of clients is missing")
	}
	d.doubles(&c, lines)
	if n, ok := fields["defaults"]; ok && !isNull(n) {
		d.defaults(&c, n)
	}
	return &c
}

// constant checks a field that has one value.
func (d *decoder) constant(root *yaml.Node, fields map[string]*yaml.Node, key, want string) {
	n, ok := fields[key]
	if !ok {
		d.wrong(root, key, "it is missing; write %s: %s", key, want)
		return
	}
	if got, ok := d.text(n, key); ok && got != want {
		d.wrong(n, key, "%q is not known; write %s", short(got), want)
	}
}

// clients reads the list of clients with the function for one.
func (d *decoder) clients(c *Catalog, lines map[*Client]*yaml.Node, n *yaml.Node, field string, one func(*yaml.Node, string) *Client) {
	n = resolve(n)
	switch {
	case n.Kind != yaml.SequenceNode:
		d.wrong(n, field, "this is a list of clients")
		return
	case len(n.Content) == 0:
		d.wrong(n, field, "there is no client")
		return
	case len(n.Content) > maxClients:
		d.wrong(n, field, "%d clients; a catalog has at most %d", len(n.Content), maxClients)
		return
	}
	// The addresses are stable as there is room for all.
	c.Clients = make([]Client, 0, len(n.Content))
	for i, item := range n.Content {
		if k := one(item, fmt.Sprintf("%s[%d]", field, i)); k != nil {
			c.Clients = append(c.Clients, *k)
			lines[&c.Clients[len(c.Clients)-1]] = item
		}
	}
}

// doubles finds clients with the same version and operating system.
func (d *decoder) doubles(c *Catalog, lines map[*Client]*yaml.Node) {
	seen := map[[2]string]*Client{}
	for i := range c.Clients {
		k := &c.Clients[i]
		if k.Version == "" || k.OS == "" {
			continue
		}
		id := [2]string{k.Version, k.OS}
		if first, ok := seen[id]; ok {
			d.wrong(lines[k], "", "duplicate client %s for %s, first in line %d", k.Version, k.OS, lines[first].Line)
			continue
		}
		seen[id] = k
	}
}

// defaults reads the client of pods that do not say.
func (d *decoder) defaults(c *Catalog, n *yaml.Node) {
	fields := d.mapping(n, "defaults", []string{"version", "os"})
	for _, key := range []string{"version", "os"} {
		value, ok := fields[key]
		if !ok || isNull(value) {
			continue
		}
		s, ok := d.text(value, "defaults."+key)
		if !ok || s == "" {
			continue
		}
		known := func(k Client) bool { return k.Version == s }
		if key == "os" {
			c.DefaultOS = s
			known = func(k Client) bool { return k.OS == s }
		} else {
			c.DefaultVersion = s
		}
		if !slices.ContainsFunc(c.Clients, known) {
			d.wrong(value, "defaults."+key, "there is no client for %q", short(s))
		}
	}
	if c.DefaultVersion != "" && c.DefaultOS != "" && len(d.mistakes) == 0 {
		if _, err := c.Find("", ""); err != nil {
			d.wrong(n, "defaults", "there is no client %s for %s", c.DefaultVersion, c.DefaultOS)
		}
	}
}

var clientKeys = []string{"version", "os", "image", "root", "binary", "libraryPath", "optSource", "command", "singleSecret"}

// client reads a client of the present form.
func (d *decoder) client(n *yaml.Node, field string) *Client {
	fields := d.mapping(n, field, clientKeys)
	if fields == nil {
		return nil
	}
	var k Client
	get := func(key string) (s string, there bool) {
		value, there := fields[key]
		if !there {
			return "", false
		}
		s, _ = d.text(value, field+"."+key)
		return s, true
	}
	required := func(key, example string) string {
		s, there := get(key)
		if !there {
			d.wrong(n, field+"."+key, "it is missing; write such as %s", example)
		}
		return s
	}
	k.Version = d.name(fields["version"], field+".version", required("version", `"450"`))
	k.OS = d.name(fields["os"], field+".os", required("os", "ubuntu18"))
	if image, there := get("image"); there {
		k.Image = image
		if !imageName.MatchString(image) {
			d.wrong(fields["image"], field+".image", "%q is not an image name", short(image))
		}
	}
	root := required("root", MountPath+"/client")
	k.Root = strings.TrimRight(root, "/")
	if root != "" {
		d.below(fields["root"], field+".root", k.Root, MountPath)
	}

	form := ""
	if command, ok := fields["command"]; ok {
		form = d.command(&k, command, field+".command")
	} else {
		d.wrong(n, field+".command", "it is missing; write %s, or the words of the client", strings.Join(formNames, " or "))
	}
	k.SingleSecret = form == formBitfusion2
	if single, ok := fields["singleSecret"]; ok {
		k.SingleSecret = d.boolean(single, field+".singleSecret")
	}

	binary, there := get("binary")
	switch {
	case there:
		k.Binary = binary
	case form != "":
		k.Binary = k.Root + "/usr/bin/bitfusion"
	case fields["command"] != nil && resolve(fields["command"]).Kind == yaml.MappingNode:
		d.wrong(n, field+".binary", "it is missing; it is predefined only for the commands %s", strings.Join(formNames, ", "))
	}
	if k.LibraryPath, there = get("libraryPath"); !there && form != "" {
		k.LibraryPath = k.Root + "/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/"
		if form == formBitfusion2 {
			k.LibraryPath = k.Root + "/opt/bitfusion/lib/x86_64-linux-gnu/lib/"
		}
	}
	if k.OptSource, there = get("optSource"); !there && form != "" {
		k.OptSource = k.Root + "/opt/bitfusion"
	}
	k.OptSource = strings.TrimRight(k.OptSource, "/")
	if root != "" {
		d.paths(&k, n, map[string]*yaml.Node{"binary": fields["binary"], "libraryPath": fields["libraryPath"],
			"optSource": fields["optSource"]},
			field, [3]string{"binary", "libraryPath", "optSource"})
	}
	return &k
}

// originalVersion reads the number of a version in the original's table.
var originalVersion = regexp.MustCompile(`\A[0-9]{3}\z`)

// originalClient reads a row of the original's table.
func (d *decoder) originalClient(n *yaml.Node, field string) *Client {
	keys := []string{"BitfusionVersion", "OSVersion", "BinaryPath", "EnvVariable"}
	fields := d.mapping(n, field, keys)
	if fields == nil {
		return nil
	}
	values := map[string]string{}
	for _, key := range keys {
		value, ok := fields[key]
		if !ok {
			d.wrong(n, field+"."+key, "it is missing")
			continue
		}
		values[key], _ = d.text(value, field+"."+key)
	}
	k := Client{
		Version: d.name(fields["BitfusionVersion"], field+".BitfusionVersion", values["BitfusionVersion"]),
		OS:      d.name(fields["OSVersion"], field+".OSVersion", values["OSVersion"]),
		Binary:  values["BinaryPath"],
	}
	form := formBitfusion
	if originalVersion.MatchString(k.Version) {
		switch v, _ := strconv.Atoi(k.Version); {
		case v < 350:
			form = formBitfusion2
		case v < 400:
			form = formBitfusion3
		}
	}
	k.Command, k.SingleSecret = namedForm(form), form == formBitfusion2
	if k.Binary == "" {
		return &k
	}
	folder, _, deeper := strings.Cut(strings.TrimPrefix(k.Binary, MountPath+"/"), "/")
	if !strings.HasPrefix(k.Binary, MountPath+"/") || !deeper {
		d.wrong(fields["BinaryPath"], field+".BinaryPath", "%q is not in a folder below %s", short(k.Binary), MountPath)
		return &k
	}
	k.Root = MountPath + "/" + folder
	// Nothing but $(NAME) is replaced in the value of a variable, so the original's
	// ":$LD_LIBRARY_PATH" never meant anything.
	k.LibraryPath = values["EnvVariable"]
	for _, suffix := range []string{":$LD_LIBRARY_PATH", ":${LD_LIBRARY_PATH}", ":$(LD_LIBRARY_PATH)"} {
		k.LibraryPath = strings.TrimSuffix(k.LibraryPath, suffix)
	}
	k.LibraryPath = strings.TrimRight(k.LibraryPath, ":")
	for part := range strings.SplitSeq(k.LibraryPath, ":") {
		if before, _, ok := strings.Cut(part+"/", OptPath+"/"); ok && before != "" {
			k.OptSource = before + OptPath
			break
		}
	}
	d.paths(&k, n, map[string]*yaml.Node{"binary": fields["BinaryPath"], "libraryPath": fields["EnvVariable"],
		"optSource": fields["EnvVariable"]},
		field, [3]string{"BinaryPath", "EnvVariable", "EnvVariable"})
	return &k
}

// paths checks those of a client that are below its root.
func (d *decoder) paths(k *Client, n *yaml.Node, nodes map[string]*yaml.Node, field string, names [3]string) {
	at := func(key string) *yaml.Node {
		if node := nodes[key]; node != nil {
			return node
		}
		return n
	}
	if k.Binary != "" {
		d.below(at("binary"), field+"."+names[0], k.Binary, k.Root)
	}
	if k.LibraryPath != "" {
		for part := range strings.SplitSeq(k.LibraryPath, ":") {
			if part != OptPath && !strings.HasPrefix(part, OptPath+"/") {
				d.below(at("libraryPath"), field+"."+names[1], part, k.Root)
			} else {
				d.below(at("libraryPath"), field+"."+names[1], part, OptPath)
			}
		}
	}
	if k.OptSource != "" && names[2] != names[1] {
		d.below(at("optSource"), field+"."+names[2], k.OptSource, k.Root)
	}
}

var (
	// pathForm has no blank and nothing that a shell or kubelet would replace.
	pathForm  = regexp.MustCompile(`\A/[A-Za-z0-9._+%@,=~/-]{0,900}\z`)
	nameForm  = regexp.MustCompile(`\A[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\z`)
	imageName = regexp.MustCompile(`\A[A-Za-z0-9][A-Za-z0-9._:/@-]{0,900}\z`)
)

// below checks a path that must be below a folder.
func (d *decoder) below(n *yaml.Node, field, p, folder string) {
	switch trimmed := strings.TrimRight(p, "/"); {
	case !pathForm.MatchString(p):
		d.wrong(n, field, "%q is not a valid path; write an absolute one of letters, digits and . _ + %% @ , = ~ -", short(p))
	case path.Clean(p) != trimmed:
		d.wrong(n, field, "%q is not a clean path; write %s", short(p), short(path.Clean(p)))
	case !strings.HasPrefix(trimmed, folder+"/") && (trimmed != folder || folder != OptPath):
		d.wrong(n, field, "%q is not below %s", short(p), short(folder))
	}
}

// name checks a version or the name of an operating system.
func (d *decoder) name(n *yaml.Node, field, s string) string {
	if n != nil && s != "" && !nameForm.MatchString(s) {
		d.wrong(n, field, "%q is not accepted; write at most 63 letters, digits, . _ and -", short(s))
	}
	return s
}

// command reads a command form, and returns its name if it is a named one.
func (d *decoder) command(k *Client, n *yaml.Node, field string) string {
	n = resolve(n)
	if n.Kind == yaml.ScalarNode {
		name, ok := d.text(n, field)
		if !ok {
			return ""
		}
		if !slices.Contains(formNames, name) {
			d.wrong(n, field, "%q is not known; write %s, or the words of the client", short(name), strings.Join(formNames, " or "))
		}
		k.Command = namedForm(name)
		return name
	}
	fields := d.mapping(n, field, []string{"shell", "percent", "memory", "filter", "separator"})
	if fields == nil {
		return ""
	}
	if shell, ok := fields["shell"]; ok && !isNull(shell) {
		k.Command.Shell, _ = d.textOrEmpty(shell, field+".shell")
		if s := k.Command.Shell; s != "" && (!pathForm.MatchString(s) || path.Clean(s) != s) {
			d.wrong(shell, field+".shell", "%q is not an absolute path of a shell, such as /bin/bash", short(s))
		}
	}
	common := []string{"amount", "units"}
	k.Command.Percent = d.words(fields["percent"], field+".percent", append(slices.Clone(common), "percent", "fraction"))
	k.Command.Memory = d.words(fields["memory"], field+".memory", append(slices.Clone(common), "megabytes"))
	k.Command.Filter = d.words(fields["filter"], field+".filter", append(slices.Clone(common), "filter"))
	k.Command.Separator = d.words(fields["separator"], field+".separator", nil)
	if isEmpty(fields["percent"]) && isEmpty(fields["memory"]) {
		d.wrong(n, field, "words for requests by percent and by memory are both missing; write at least one of them")
	}
	if filter := k.Command.Filter; len(filter) > 0 && !strings.Contains(strings.Join(filter, " "), "${filter}") {
		d.wrong(fields["filter"], field+".filter", "the words do not contain ${filter}, so filters would be lost")
	}
	return ""
}

var placeholder = regexp.MustCompile(`\$\{[^}]*\}`)

// words reads a list of words in which placeholders may stand.
func (d *decoder) words(n *yaml.Node, field string, placeholders []string) []string {
	if n == nil || isNull(n) {
		return nil
	}
	n = resolve(n)
	switch {
	case n.Kind != yaml.SequenceNode:
		d.wrong(n, field, `this is a list of words, such as ["run", "-n", "${amount}"]`)
		return nil
	case len(n.Content) > maxWords:
		d.wrong(n, field, "%d words; write at most %d", len(n.Content), maxWords)
		return nil
	}
	words := make([]string, 0, len(n.Content))
	for i, item := range n.Content {
		at := fmt.Sprintf("%s[%d]", field, i)
		word, ok := d.textOrEmpty(item, at)
		if !ok {
			continue
		}
		for _, p := range placeholder.FindAllString(word, -1) {
			if !slices.Contains(placeholders, p[2:len(p)-1]) {
				d.wrong(item, at, "%s is unknown; use %s", short(p), quotedPlaceholders(placeholders))
			}
		}
		if rest := placeholder.ReplaceAllString(word, ""); strings.ContainsAny(rest, "$\x00") {
			d.wrong(item, at, "%q contains a $ that does not begin a placeholder; use %s", short(word), quotedPlaceholders(placeholders))
		}
		words = append(words, word)
	}
	return words
}

func quotedPlaceholders(names []string) string {
	if len(names) == 0 {
		return nothing
	}
	return "${" + strings.Join(names, "}, ${") + "}"
}

// mapping returns the values of a mapping by their keys; other keys than those
// known and double ones are mistakes.
func (d *decoder) mapping(n *yaml.Node, field string, known []string) map[string]*yaml.Node {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		d.wrong(n, field, "keys are expected here: %s", strings.Join(known, ", "))
		return nil
	}
	if len(n.Content) > 2*maxWords { // an alias may repeat them for every client
		d.wrong(n, field, "%d keys; valid keys are %s", len(n.Content)/2, strings.Join(known, ", "))
		return nil
	}
	fields := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := resolve(n.Content[i]), n.Content[i+1]
		name := key.Value
		_, double := fields[name]
		switch {
		case key.Kind != yaml.ScalarNode || !slices.Contains(known, name):
			d.wrong(key, field, "unknown key %q; valid keys are %s", short(name), strings.Join(known, ", "))
		case double:
			d.wrong(key, field, "duplicate key %q", short(name))
		default:
			fields[name] = value
		}
	}
	return fields
}

// text returns a text that is not empty.
func (d *decoder) text(n *yaml.Node, field string) (string, bool) {
	s, ok := d.textOrEmpty(n, field)
	if ok && s == "" && !strings.HasPrefix(field, "defaults.") && !mayBeEmpty(field) {
		d.wrong(n, field, "it is empty")
		return "", false
	}
	return s, ok
}

// mayBeEmpty reports whether the empty text says something: that there is none.
func mayBeEmpty(field string) bool {
	return strings.HasSuffix(field, ".libraryPath") || strings.HasSuffix(field, ".optSource") || strings.HasSuffix(field, ".EnvVariable")
}

// textOrEmpty returns the text of a scalar; numbers are taken as they are
// written, since versions look like them.
func (d *decoder) textOrEmpty(n *yaml.Node, field string) (string, bool) {
	n = resolve(n)
	if n.Kind == yaml.ScalarNode && slices.Contains([]string{"!!str", "!!int", "!!float"}, n.ShortTag()) {
		return n.Value, true
	}
	d.wrong(n, field, "a text is expected here; put it in quotes")
	return "", false
}

// boolean returns true or false.
func (d *decoder) boolean(n *yaml.Node, field string) bool {
	n = resolve(n)
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!bool" {
		switch n.Value {
		case "true":
			return true
		case "false":
			return false
		}
	}
	d.wrong(n, field, "true or false is expected here")
	return false
}

// resolve follows an alias to what it stands for.
func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode && n.Alias != nil {
		n = n.Alias
	}
	return n
}

// isEmpty reports whether there is no list, or one of nothing.
func isEmpty(n *yaml.Node) bool {
	return n == nil || isNull(n) || resolve(n).Kind == yaml.SequenceNode && len(resolve(n).Content) == 0
}

func isNull(n *yaml.Node) bool {
	n = resolve(n)
	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}
