package demos

import "strings"

// Lines of the extender's report, which is indented by four blanks a level.
const (
	deviceOpens  = "                {"
	deviceCloses = "                }"
)

// abridge shortens the extender's report about one node as the guide does: of
// the devices, the first ones and the last stay, with dots between.
func abridge(report string, first int) string {
	var kept []string
	device, total := 0, strings.Count(report, "\n"+deviceOpens+"\n")
	for line := range strings.Lines(report) {
		line = strings.TrimRight(line, "\n")
		if line == deviceOpens {
			device++
		}
		inside := line == deviceOpens || device > 0 && strings.HasPrefix(line, deviceCloses[:len(deviceCloses)-1])
		switch {
		case !inside || device <= first || device == total:
			kept = append(kept, line)
		case line == deviceOpens && device == first+1:
			kept = append(kept, deviceOpens[:len(deviceOpens)-1]+"......")
		}
	}
	return strings.Join(kept, "\n")
}
