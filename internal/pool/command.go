package pool

import "errors"

// Wrap returns the command of a container put behind the client, and the
// arguments that remain. command and args are the container's; a container
// without a command has the image's entrypoint, which the caller must know.
//
// A command of one element with blanks is shell text, as the guides write it.
// Text of one simple command, and lists of words, follow the client directly;
// other text is given to a shell behind the client, so that all of it runs on the
// pool. Words are quoted, so none is ever read as shell text. Elements with
// $(NAME), which kubelet replaces, are kept as elements of their own.
//
// A command that calls the client already is returned as it is, with called true.
func (c *Client) Wrap(r Request, filters, command, args []string) (newCommand, newArgs []string, called bool, err error) {
	return nil, nil, false, errors.New("not written")
}
