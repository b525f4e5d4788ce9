// Package coalesce collects what is written to a connection in small pieces and hands it
// to the kernel in one, as soon as the process has nothing else to do.
//
// HTTP/2 as net/http and golang.org/x/net/http2 speak it writes each frame by itself:
// an answer is one for its header and one for its body, a request likewise, and what is
// read is acknowledged by further ones of a few bytes. Each costs a system call here and
// wakes the other side. Where the two share processors that have enough to do, the
// waking costs more than the work.
//
// Nothing waits for a timer. A goroutine that takes its turn after all that could run
// when the first piece came writes what has come by then.
package coalesce
