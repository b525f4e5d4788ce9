// Package nodeconfig finds out how divvy-node is to be configured: from files
// of its own form, from the files of the device plugins that it takes the place
// of, from the environment and from the command line, and again whenever one of
// the files or the node's label changes.
//
// Precedence: command line > environment > files > defaults. Of several files
// the later one goes before the earlier one; a file of another plugin replaces
// the resources of its vendor and the settings that it makes, and touches
// nothing else.
//
// What an old file or variable asks for and this program does not do is never
// dropped in silence: it is a warning that says why and what to do. A file of
// this program's own form is read strictly: what is unknown there is a mistake.
package nodeconfig
