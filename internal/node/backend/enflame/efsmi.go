package enflame

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
)

// The library has no calls for DRS, in which a card is cut into instances. The vendor's
// program efsmi has, and it prints text for people. Divvy only asks it: nothing here changes a
// card.

// tool is the vendor's program efsmi in a driver root.
type tool struct {
	places libfile.Places
	limit  time.Duration
	queue  *callqueue.Queue
}

func newTool(o backend.Options) *tool {
	return &tool{
		places: libfile.Places{
			Names:    []string{"efsmi"},
			Folders:  []string{"/usr/bin", "/usr/local/bin", "/usr/sbin"},
			Releases: []string{"/usr/local/efsmi/efsmi-*", "/usr/local/efsmi/efsmi-*/bin"},
			Root:     o.DriverRoot, LoaderLast: true,
		},
		limit: o.CallTimeout,
		// A program that was killed may still not end, while the driver does not return.
		queue: callqueue.New(o.CallTimeout+time.Second, o.Observe),
	}
}

// maxOutput bounds what is read of the program's output; 128 cards take some 30 KiB.
const maxOutput = 1 << 20

// run runs the program about the card of that index, or callqueue.Library, and returns what it
// prints. Below another root it runs with that as its root folder, because its libraries and
// the device nodes are there.
func (t *tool) run(ctx context.Context, about int, args ...string) (string, error) {
	name := strings.Join(append([]string{"efsmi"}, args...), " ")
	return callqueue.Run(ctx, t.queue, about, name, func() (string, error) {
		files, err := t.places.Candidates()
		if err != nil {
			return "", err
		}
		if len(files) == 0 {
			return "", t.places.NotFound()
		}
		ctx, cancel := context.WithTimeout(ctx, t.limit)
		defer cancel()
		file, attributes := files[0], &syscall.SysProcAttr{Setpgid: true}
		if root := filepath.Clean(t.places.Root); root != "/" && os.Geteuid() == 0 {
			attributes.Chroot, file = root, strings.TrimPrefix(file, root)
		}
		command := exec.CommandContext(ctx, file, args...)
		command.SysProcAttr, command.WaitDelay = attributes, time.Second
		command.Dir, command.Env = "/", []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL=C"}
		command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
		var out, said limited
		command.Stdout, command.Stderr = &out, &said
		if err := command.Run(); err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("did not end within %v", t.limit)
			}
			if text := strings.TrimSpace(said.String()); text != "" {
				err = fmt.Errorf("%w: %s", err, text)
			}
			return "", fmt.Errorf("%s: %w", name, err)
		}
		return out.String(), nil
	})
}

// limited is output of which the beginning is kept.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	if left := maxOutput - l.Len(); left > 0 {
		_, _ = l.Buffer.Write(p[:min(left, len(p))]) // it never fails
	}
	return len(p), nil
}

// drsCard is a card as the program's table shows it.
type drsCard struct {
	index int
	// bus is the end of its PCI address, and mode that of its virtualization.
	bus, mode string
}

// The modes of virtualization that are known.
const (
	modeOff = "Disable"
	modeDRS = "DRS"
)

var (
	busPattern = regexp.MustCompile(`^([0-9a-f]{2,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$`)
	// profilePattern is the form of a profile: the slices of a card, of which it has six, and
	// the memory.
	profilePattern = regexp.MustCompile(`^[1-9][0-9]?g\.([1-9][0-9]{0,3})gb$`)
	numberPattern  = regexp.MustCompile(`^[0-9]{1,3}$`)
	uuidPattern    = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
)

// parseCards reads the program's table, which has two lines for each card: in the first,
// columns of which one begins with its number and the third with its PCI address, in the second
// the mode as the sixth word, after the characters | and / were taken out.
func parseCards(text string) ([]drsCard, error) {
	var lines []string
	for line := range strings.Lines(text) {
		if strings.Trim(line, "|+-= \t\r\n") != "" { // not a border
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	var out []drsCard
	for i, line := range lines {
		columns := strings.Split(line, "|")
		if len(columns) < 4 {
			continue
		}
		first, third := strings.Fields(columns[1]), strings.Fields(columns[3])
		if len(first) == 0 || len(third) == 0 || !busPattern.MatchString(strings.ToLower(third[0])) {
			continue
		}
		index, err := strconv.Atoi(first[0])
		if err != nil || index < 0 {
			return nil, fmt.Errorf("efsmi: %q is not the number of a card, in %q", first[0], line)
		}
		if i+1 == len(lines) {
			return nil, fmt.Errorf("efsmi: the second line of card %d is missing", index)
		}
		words := strings.Fields(strings.NewReplacer("|", "", "/", "").Replace(lines[i+1]))
		if len(words) < 6 {
			return nil, fmt.Errorf("efsmi: the second line of card %d has no sixth word, the virtualization mode: %q", index, lines[i+1])
		}
		out = append(out, drsCard{index: index, bus: strings.ToLower(third[0]), mode: words[5]})
	}
	if len(out) == 0 {
		return nil, errors.New("efsmi: the table has no line with a PCI address")
	}
	return out, nil
}

// cardAt returns the card at a PCI address. The program may leave out a part of the domain.
func cardAt(cards []drsCard, pci string) (drsCard, error) {
	at := slices.DeleteFunc(slices.Clone(cards), func(c drsCard) bool { return !strings.HasSuffix(strings.ToLower(pci), c.bus) })
	if len(at) != 1 {
		return drsCard{}, fmt.Errorf("efsmi lists %d cards at PCI address %s", len(at), pci)
	}
	return at[0], nil
}

// drsInstance is a DRS instance of a card.
type drsInstance struct{ uuid, profile string }

// memoryBytes is the memory that the profile names, in GB of 2^30 bytes.
func (d drsInstance) memoryBytes() int64 {
	gb, _ := strconv.ParseInt(profilePattern.FindStringSubmatch(d.profile)[1], 10, 64) // at most four digits
	return gb << 30
}

// parseInstances reads the program's list of a card's instances: the lines that have a
// profile. Enflame's own plugin reads four words of such a line: the card's index, the profile,
// the instance's id and its uuid. Releases that mark the uuid otherwise are read too; a line
// without a uuid is an error.
func parseInstances(text string) ([]drsInstance, error) {
	var out []drsInstance
	for line := range strings.Lines(text) {
		words := strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" \t\r\n|()[],:;=\"'", r) })
		var profiles, uuids []string
		for i, w := range words {
			uuid, named := strings.CutPrefix(w, idPrefixDRS)
			switch {
			case profilePattern.MatchString(w):
				profiles = append(profiles, w)
			case named && uuid != "", uuidPattern.MatchString(w), i > 0 && strings.EqualFold(words[i-1], "uuid"):
				uuids = append(uuids, uuid)
			}
		}
		if len(uuids) == 0 && len(words) >= 4 && profilePattern.MatchString(words[1]) && numberPattern.MatchString(words[0]) {
			uuids = append(uuids, words[3])
		}
		switch {
		case len(profiles) == 0:
		case len(profiles) > 1 || len(uuids) != 1:
			return nil, fmt.Errorf("efsmi -L: %q is not the line of one instance, with its profile and its uuid", strings.TrimSpace(line))
		default:
			out = append(out, drsInstance{uuid: uuids[0], profile: profiles[0]})
		}
	}
	return out, nil
}
