package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// configuration writes the types of the configuration file with their comments.
func configuration(root string, w *strings.Builder) error {
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "api/config/v1alpha1/types.go"), nil, parser.ParseComments)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "`apiVersion: %s`, `kind: %s`. [configuration.md](../configuration.md) describes how files, variables and flags\n"+
		"go over one another, and what takes effect when. The chart writes this file from its [values](values.md).\n", v1alpha1.APIVersion,
		v1alpha1.Kind)
	defaults := map[string]string{}
	text, err := v1alpha1.Encode(v1alpha1.Default())
	if err != nil {
		return err
	}
	d := v1alpha1.Default()
	for i, v := 0, reflect.ValueOf(d); i < v.NumField(); i++ {
		key, field := v.Type().Field(i).Tag.Get("yaml"), v.Field(i)
		if field.Kind() == reflect.String {
			defaults["NodeConfig."+key] = field.String()
		}
	}
	if len(defaults) < 5 {
		return errors.New("no defaults were found")
	}
	defaults["NodeConfig.healthInterval"] = durationText(d.HealthInterval)
	defaults["Usage.enabled"], defaults["Usage.interval"] = strconv.FormatBool(d.Usage.Enabled), durationText(d.Usage.Interval)
	defaults["Usage.metrics"] = string(d.Usage.Metrics)
	defaults["NodeConfig.resources"] = "`enflame.com/gcu-memory`, see below"
	defaults["Health.recoverAfter"] = durationText(v1alpha1.DefaultRecoverAfter)
	words, vocabulary := wordsOf(file), vocabulary(file)
	for _, decl := range file.Decls {
		general, ok := decl.(*ast.GenDecl)
		if !ok || general.Tok != token.TYPE {
			continue
		}
		for _, spec := range general.Specs {
			t, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			if s, ok := t.Type.(*ast.StructType); ok {
				fmt.Fprintf(w, "\n## %s\n\n%s\n\n", t.Name.Name, prettify(general.Doc.Text(), vocabulary))
				table(w, "key", "type", "default", "meaning")
				for _, f := range s.Fields.List {
					key := reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("yaml")
					value := defaults[t.Name.Name+"."+key]
					if value != "" && !strings.Contains(value, "`") {
						value = code(value)
					}
					row(w, code(key), typeText(f.Type, words), value, prettify(own(f), vocabulary))
				}
			}
		}
	}
	fmt.Fprintf(w, "\n## Without a file\n\nNothing but this holds, and the defaults above:\n\n```yaml\n%s```\n", text)
	return nil
}

func durationText(d v1alpha1.Duration) string { return time.Duration(d).String() }

// wordsOf are the values that a named type of text may have, with what each means.
func wordsOf(file *ast.File) map[string][]string {
	out := map[string][]string{}
	for _, decl := range file.Decls {
		general, ok := decl.(*ast.GenDecl)
		if !ok || general.Tok != token.CONST {
			continue
		}
		for _, spec := range general.Specs {
			v, ok := spec.(*ast.ValueSpec)
			if !ok || v.Type == nil || len(v.Values) != 1 {
				continue
			}
			name, isName := v.Type.(*ast.Ident)
			literal, isLiteral := v.Values[0].(*ast.BasicLit)
			if isName && isLiteral {
				out[name.Name] = append(out[name.Name], code(strings.Trim(literal.Value, `"`)))
			}
		}
	}
	return out
}

// typeText says what a key holds.
func typeText(e ast.Expr, words map[string][]string) string {
	switch t := e.(type) {
	case *ast.StarExpr:
		return typeText(t.X, words)
	case *ast.ArrayType:
		return "list of " + typeText(t.Elt, words)
	case *ast.MapType:
		return "map to " + typeText(t.Value, words)
	case *ast.Ident:
		switch {
		case len(words[t.Name]) > 0:
			return strings.Join(words[t.Name], ", ")
		case t.Name == "Duration":
			return "duration"
		case t.Name == "string":
			return "text"
		case t.Name == "int":
			return "number"
		case t.Name == "bool":
			return "true or false"
		case ast.IsExported(t.Name):
			return "[" + t.Name + "](#" + strings.ToLower(t.Name) + ")"
		}
		return t.Name
	}
	return ""
}

// prettify turns a comment of Go into prose for those who write the file: names of
// fields become keys, and those of constants their values.
func prettify(doc string, words map[string]string) string {
	doc = escape(strings.TrimSpace(doc))
	return camel.ReplaceAllStringFunc(doc, func(word string) string {
		text, ok := words[word]
		if !ok {
			return word
		}
		if of, _, qualified := strings.Cut(word, "."); qualified {
			return code(text) + " of " + of
		}
		return code(text)
	})
}

// camel is a name of Go that is no word of English.
var camel = regexp.MustCompile(`[A-Z][a-zA-Z]+\.[A-Z][a-zA-Z]+|[A-Z][a-z]+(?:[A-Z][a-zA-Z]*)+|[A-Z]{2,}[a-z][a-zA-Z]*`)

// vocabulary maps names of fields to their keys and names of constants to their
// values.
func vocabulary(file *ast.File) map[string]string {
	out := map[string]string{
		"DefaultRecoverAfter": time.Duration(v1alpha1.DefaultRecoverAfter).String(), "MaxReplicas": strconv.Itoa(v1alpha1.MaxReplicas),
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.TypeSpec:
			if s, ok := n.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					key := reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("yaml")
					out[f.Names[0].Name], out[n.Name.Name+"."+f.Names[0].Name] = key, key
				}
			}
		case *ast.ValueSpec:
			if len(n.Values) == 1 {
				if literal, ok := n.Values[0].(*ast.BasicLit); ok && literal.Kind == token.STRING {
					out[n.Names[0].Name] = strings.Trim(literal.Value, `"`)
				}
			}
		}
		return true
	})
	return out
}

// own drops the name of the field with which its comment begins.
func own(f *ast.Field) string {
	text := strings.TrimSpace(f.Doc.Text())
	for _, verb := range []string{" is ", " are ", " holds ", " says ", " gives ", " keeps ", " names ", " receives ", " chooses ",
		" makes ", " takes ", " rejects "} {
		if rest, ok := strings.CutPrefix(text, f.Names[0].Name+verb); ok {
			if verb == " is " || verb == " are " {
				return rest
			}
			return strings.TrimSpace(verb) + " " + rest
		}
	}
	return text
}
