package pool

import (
	"slices"
	"strings"
	"unicode"

	"mvdan.cc/sh/v3/syntax"
)

// maxParsed bounds the text that is parsed; longer text is left to a shell. The
// parser is recursive, so this bounds its stack as well.
const maxParsed = 16 << 10

// shellText is what is known of a text before a shell has seen it.
type shellText struct {
	// single says that it is one simple command without redirections, so that
	// arguments can be added to its end; command is that part of the text, without
	// blanks, comments and semicolons around it.
	single  bool
	command string
	// asIs says that the command can be given to the client as it is: nothing of it
	// is done by the shell itself.
	asIs bool
	// words are those of the command when they need no shell to be known.
	words []string
	// first is the first word, "" when it needs a shell to be known.
	first string
}

// builtins are the commands that a shell does itself, of which a program of the
// same name, if there is one, may do something else.
var builtins = strings.Fields(`. : [ alias bg bind break builtin caller cd command compgen complete compopt continue coproc declare
	dirs disown do done echo elif else enable esac eval exec exit export false fc fg fi for function getopts hash help history if in
	jobs kill let local logout mapfile popd printf pushd pwd read readarray readonly return select set shift shopt source suspend test
	then time times trap true type typeset ulimit umask unalias unset until wait while`)

func parseText(text string, bash bool) shellText {
	var s shellText
	if fields := strings.Fields(text[:min(len(text), maxParsed)]); len(fields) > 0 {
		s.first = fields[0]
	}
	// Of control characters, such as carriage returns, parser and shells differ.
	if len(text) > maxParsed || strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\t' && r != '\n' }) {
		return s
	}
	variant := syntax.LangPOSIX
	if bash {
		variant = syntax.LangBash
	}
	file, err := syntax.NewParser(syntax.Variant(variant)).Parse(strings.NewReader(text), "")
	if err != nil || len(file.Stmts) == 0 {
		return s
	}
	s.first = firstWord(file.Stmts[0])
	if len(file.Stmts) > 1 {
		return s
	}
	stmt := file.Stmts[0]
	call, ok := stmt.Cmd.(*syntax.CallExpr)
	if !ok || len(call.Args) == 0 || stmt.Negated || stmt.Background || stmt.Coprocess || stmt.Disown || len(stmt.Redirs) > 0 {
		return s
	}
	begin, end := call.Pos().Offset(), call.End().Offset()
	if begin >= end || end > uint(len(text)) {
		return s
	}
	s.single, s.command = true, text[begin:end]
	if strings.HasSuffix(s.command, `\`) {
		s.single = false // it would take in what follows
		return s
	}

	program := call.Args[0].Lit()
	s.asIs = len(call.Assigns) == 0 && program != "" && Quote(program) == program && !slices.Contains(builtins, program) &&
		!strings.Contains(s.command, "$(") && !strings.Contains(s.command, "$$") && !substitutes(call)
	if s.asIs {
		s.words = staticWords(call.Args)
	}
	return s
}

// firstWord returns the first word of a statement, "" when it needs a shell to be
// known.
func firstWord(stmt *syntax.Stmt) string {
	for {
		switch cmd := stmt.Cmd.(type) {
		case *syntax.BinaryCmd:
			stmt = cmd.X
		case *syntax.CallExpr:
			for i, arg := range cmd.Args {
				word, ok := static(arg)
				if ok && i == 0 && word == "exec" {
					continue
				}
				return word
			}
			return ""
		default:
			return ""
		}
	}
}

func substitutes(call *syntax.CallExpr) bool {
	found := false
	syntax.Walk(call, func(node syntax.Node) bool {
		switch node.(type) {
		case *syntax.CmdSubst, *syntax.ProcSubst:
			found = true
		}
		return !found
	})
	return found
}

// staticWords returns the words that a shell would make of the arguments, nil
// when only a shell can tell.
func staticWords(args []*syntax.Word) []string {
	words := make([]string, len(args))
	for i, arg := range args {
		var ok bool
		if words[i], ok = static(arg); !ok {
			return nil
		}
	}
	return words
}

// static returns the one word that a shell would make of an argument.
func static(arg *syntax.Word) (string, bool) {
	var b strings.Builder
	for _, part := range arg.Parts {
		switch part := part.(type) {
		case *syntax.Lit:
			if strings.ContainsAny(part.Value, "\\*?[]{}~!") {
				return "", false
			}
			b.WriteString(part.Value)
		case *syntax.SglQuoted:
			if part.Dollar {
				return "", false
			}
			b.WriteString(part.Value)
		case *syntax.DblQuoted:
			if part.Dollar {
				return "", false
			}
			for _, inner := range part.Parts {
				lit, ok := inner.(*syntax.Lit)
				if !ok || strings.Contains(lit.Value, `\`) {
					return "", false
				}
				b.WriteString(lit.Value)
			}
		default:
			return "", false
		}
	}
	return b.String(), true
}
