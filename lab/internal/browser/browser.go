// Package browser runs a headless Chromium for tests of the page of "kubectl divvy ui". Chromium
// comes from Debian's packages, as what else the lab needs.
package browser

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/divvy-gpu/divvy/lab/internal/host"
)

const (
	program = "/usr/bin/chromium"
	// limit bounds the waits of one test for the page.
	limit = 5 * time.Minute
	// patience is how long a page may take to show something beside other programs.
	patience = 2 * time.Minute
)

// Page is a page in a browser of its own, which has no history and no cookies.
type Page struct {
	t   *testing.T
	ctx context.Context //nolint:containedctx // it is the browser, in chromedp
}

// Open starts a browser with a window of this size, until the test ends. Only root can install
// Chromium where it is missing; the test is skipped for others.
func Open(t *testing.T, width, height int) *Page {
	t.Helper()
	if _, err := os.Stat(program); err != nil && os.Geteuid() != 0 {
		t.Skip("Chromium is not installed, and installing it takes root")
	}
	// The fonts decide how the page looks on screenshots.
	err := host.InstallPackages(t.Context(), []host.Package{
		{Name: "chromium", Probe: program, Purpose: "tests of the page of kubectl divvy ui"},
		{Name: "fonts-dejavu-core", Probe: "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf", Purpose: "tests of that page"},
	}, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.WindowSize(width, height),
		// Chromium has no sandbox for root. The pages are the tests' own.
		chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()))
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx, chromedp.WithListener(func(event any) {
		if e, ok := event.(*runtime.EventExceptionThrown); ok { // an error in a script
			t.Errorf("the page: %+v", e.ExceptionDetails)
		}
	}))
	t.Cleanup(cancel)
	p := &Page{t, ctx}
	p.Do(chromedp.EmulateViewport(int64(width), int64(height)))
	return p
}

// Do carries actions out.
func (p *Page) Do(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// Go opens an address.
func (p *Page) Go(url string) {
	p.t.Helper()
	p.Do(chromedp.Navigate(url))
}

// Until waits for a JavaScript expression to be true.
func (p *Page) Until(expression string) {
	p.t.Helper()
	_, err := chromedp.Run(p.ctx, chromedp.Poll[bool](expression, chromedp.WithPollingTimeout(patience)))
	if err != nil {
		text, _ := chromedp.Run(p.ctx, chromedp.Evaluate[string]("document.body.innerText")) // for the message alone
		p.t.Fatalf("%v: not within %v: %s\nThe page:\n%.3000s", err, patience, expression, text)
	}
}

// Text waits until the page shows a text.
func (p *Page) Text(text string) {
	p.t.Helper()
	p.Until(fmt.Sprintf("document.body.innerText.includes(%q)", text))
}

// Eval returns the value of a JavaScript expression.
func Eval[T any](p *Page, expression string) T {
	p.t.Helper()
	out, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

// Keys types keys, as a person without a mouse does.
func (p *Page) Keys(keys string) {
	p.t.Helper()
	p.Do(chromedp.KeyEvent(keys, func(k *input.DispatchKeyEventParams) {
		// As a keyboard sends it: a page that handles it then gets no character.
		if k.Type == kb.KeyDown {
			k.Type = input.DispatchKeyEventTypeRawKeyDown
		}
	}))
}

// Dark chooses the dark or light colours, as the person's system does.
func (p *Page) Dark(on bool) {
	p.t.Helper()
	value := "light"
	if on {
		value = "dark"
	}
	_, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: value}}})
	if err != nil {
		p.t.Fatal(err)
	}
}

// CountCPU begins to count what CPU returns.
func (p *Page) CountCPU() {
	p.t.Helper()
	_, err := chromedp.Call(p.ctx, performance.Enable, performance.EnableParams{TimeDomain: performance.EnableTimeDomainThreadTicks})
	if err != nil {
		p.t.Fatal(err)
	}
}

// CPU is the time of a processor that the page's thread has taken for its tasks, in milliseconds. Unlike
// time on the wall it is about the same on a busy machine.
func (p *Page) CPU() float64 {
	p.t.Helper()
	all, err := chromedp.Call(p.ctx, performance.GetMetrics, cdp.Empty{})
	if err != nil {
		p.t.Fatal(err)
	}
	for _, m := range all.Metrics {
		if m.Name == "TaskDuration" {
			return m.Value * 1000
		}
	}
	p.t.Fatal("the browser does not count its tasks")
	return 0
}

// maxPicture bounds a picture in the repository.
const maxPicture = 200 << 10

// Picture writes what the window shows to a file of the documentation.
func (p *Page) Picture(path string) {
	p.t.Helper()
	shot, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		p.t.Fatal(err)
	}
	picture, err := fewColors(shot)
	if err != nil {
		p.t.Fatal(err)
	}
	if len(picture) > maxPicture {
		p.t.Errorf("%s has %d bytes, more than %d", path, len(picture), maxPicture)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(path, picture, 0o644); err != nil {
		p.t.Fatal(err)
	}
}

// distance is how much two colours differ: the largest difference of a component, of 255.
func distance(a, b color.Color) int {
	largest := 0
	for _, component := range []func(color.Color) uint32{
		func(c color.Color) uint32 { r, _, _, _ := c.RGBA(); return r >> 8 },
		func(c color.Color) uint32 { _, g, _, _ := c.RGBA(); return g >> 8 },
		func(c color.Color) uint32 { _, _, b, _ := c.RGBA(); return b >> 8 },
	} {
		largest = max(largest, int(component(a))-int(component(b)), int(component(b))-int(component(a)))
	}
	return largest
}

// fewColors writes a PNG with at most 256 colours, which is a third of the bytes.
func fewColors(shot []byte) ([]byte, error) {
	full, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		return nil, fmt.Errorf("read the screenshot: %w", err)
	}
	counts := map[color.Color]int{}
	for y := full.Bounds().Min.Y; y < full.Bounds().Max.Y; y++ {
		for x := full.Bounds().Min.X; x < full.Bounds().Max.X; x++ {
			counts[full.At(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(counts), func(a, b color.Color) int { return cmp.Compare(counts[b], counts[a]) })
	palette := color.Palette{}
	for _, c := range colors {
		// Shades of one colour must not take the place of another that is rare.
		if len(palette) < 256 && (len(palette) == 0 || distance(c, palette.Convert(c)) > 5) {
			palette = append(palette, c)
		}
	}
	few := image.NewPaletted(full.Bounds(), palette)
	nearest := map[color.Color]uint8{}
	for c := range counts {
		nearest[c] = uint8(few.Palette.Index(c)) //nolint:gosec // below 256
	}
	for y := full.Bounds().Min.Y; y < full.Bounds().Max.Y; y++ {
		for x := full.Bounds().Min.X; x < full.Bounds().Max.X; x++ {
			few.SetColorIndex(x, y, nearest[full.At(x, y)])
		}
	}
	var out bytes.Buffer
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	if err := encoder.Encode(&out, few); err != nil {
		return nil, fmt.Errorf("write the picture: %w", err)
	}
	return out.Bytes(), nil
}
