package sharing

// alphabet are the digits of unit ids. 64 of them give 64 + 64^2 + 64^3 =
// 266 304 ids of at most three characters, enough for 8 cards of 32 GB in
// units of 0.001 GB: kubelet accepts at most 4 MiB per ListAndWatch message
// and an entry costs 13 bytes plus the id.
const alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"

// noDigit marks bytes that are not in the alphabet.
const noDigit = 0xff

var digits = func() (t [256]byte) {
	for i := range t {
		t[i] = noDigit
	}
	for i := range len(alphabet) {
		t[alphabet[i]] = byte(i)
	}
	return t
}()

// maxNumber bounds what parseID accepts: 64^5 is far beyond any node.
const maxNumber = 1 << 30

// formatID writes n >= 0 in bijective base 64: every number has one shortest
// spelling and no two numbers share one.
func formatID(n int64) string {
	var buf [8]byte
	i := len(buf)
	for n++; n > 0; n = (n - 1) / int64(len(alphabet)) {
		i--
		buf[i] = alphabet[(n-1)%int64(len(alphabet))]
	}
	return string(buf[i:])
}

// parseID is the inverse of formatID; false for anything it never writes.
func parseID(s string) (int64, bool) {
	if s == "" || len(s) > 5 {
		return 0, false
	}
	var n int64
	for i := range len(s) {
		d := digits[s[i]]
		if d == noDigit {
			return 0, false
		}
		n = n*int64(len(alphabet)) + int64(d) + 1
	}
	return n - 1, n <= maxNumber
}
