package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/control"
	appflags "github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/app/node"
	"github.com/divvy-gpu/divvy/internal/app/plugin"
	"github.com/divvy-gpu/divvy/internal/app/scheduler"
)

// everyFlag is in the text of commands all of whose flags have a variable.
const everyFlag = "Every flag can be given as an environment variable"

// flags writes the commands of all programs.
func flags(_ string, w *strings.Builder) error {
	w.WriteString("Flags take precedence over environment variables, environment variables over defaults. `--help` prints the same.\n")
	for _, root := range []*cobra.Command{node.Command("divvy-node"), control.Command(), scheduler.Command("", nil), plugin.Command()} {
		root.InitDefaultHelpCmd()
		fmt.Fprintf(w, "\n## %s\n", root.DisplayName())
		if !root.Runnable() {
			fmt.Fprintf(w, "\n%s.\n", strings.TrimSuffix(root.Short, "."))
		}
		command(w, root)
	}
	return nil
}

func command(w *strings.Builder, cmd *cobra.Command) {
	if cmd.Runnable() && (cmd.HasParent() || hasFlags(cmd)) && cmd.Name() != "help" {
		if cmd.HasParent() {
			fmt.Fprintf(w, "\n### %s\n\n%s\n", cmd.CommandPath(), prose(cmd))
		} else {
			fmt.Fprintf(w, "\n%s\n", prose(cmd))
		}
		fmt.Fprintf(w, "\n    %s\n", cmd.UseLine())
		if hasFlags(cmd) {
			flagTable(w, cmd)
		}
	}
	for _, sub := range cmd.Commands() {
		if !sub.Hidden && sub.Name() != "help" && sub.Name() != "completion" {
			command(w, sub)
		}
	}
}

// prose is what the command says of itself.
func prose(cmd *cobra.Command) string {
	text := cmd.Long
	if text == "" {
		text = strings.TrimSuffix(cmd.Short, ".") + "."
	}
	return escape(strings.TrimSpace(text))
}

func hasFlags(cmd *cobra.Command) bool {
	found := false
	visit(cmd, func(*pflag.Flag) { found = true })
	return found
}

// visit calls f for the flags that are worth telling.
func visit(cmd *cobra.Command, f func(*pflag.Flag)) {
	cmd.NonInheritedFlags().VisitAll(func(flag *pflag.Flag) {
		if flag.Name != "help" && flag.Name != "version" && !flag.Hidden {
			f(flag)
		}
	})
}

func flagTable(w *strings.Builder, cmd *cobra.Command) {
	variables := strings.Contains(cmd.Long, everyFlag)
	w.WriteString("\n")
	if variables {
		table(w, "flag", "variable", "default", "meaning")
	} else {
		table(w, "flag", "default", "meaning")
	}
	visit(cmd, func(f *pflag.Flag) {
		kind, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if kind != "" {
			name += " " + kind
		}
		value := f.DefValue
		if value == "[]" {
			value = ""
		}
		usage = escape(usage)
		if variables {
			row(w, code(name), code(appflags.EnvName(f.Name)), code(value), usage)
		} else {
			row(w, code(name), code(value), usage)
		}
	})
}
