package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	yaml "go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Files of the chart that hold what the tables of vendors and policies say.
const (
	vendorsFile = "charts/divvy/files/vendors.yaml"
	schemaFile  = "charts/divvy/values.schema.json"
)

// chartVendor is what the templates know of a vendor.
type chartVendor struct {
	Name           string   `yaml:"name"`
	NodeLabel      string   `yaml:"nodeLabel"`
	Labels         string   `yaml:"labels"`
	ChoosingLabels string   `yaml:"choosingLabels"`
	Annotations    []string `yaml:"annotations,flow"` // of pods, which Divvy alone writes
}

// chart returns the files of the chart below root that the tables of vendors and
// policies are in.
func chart(root string) (map[string]string, error) {
	var list []chartVendor
	for _, v := range accel.Vendors {
		annotations := slices.Sorted(maps.Keys(wire.LegacyAnnotations(accel.Grant{Resource: v.Memory})))
		list = append(list, chartVendor{v.Name, v.NodeLabel, v.Labels, v.ChoosingLabels, annotations})
	}
	vendors, err := yaml.Marshal(list)
	if err != nil {
		return nil, err
	}
	schema, err := os.ReadFile(filepath.Join(root, schemaFile))
	if err != nil {
		return nil, err
	}
	for key, names := range map[string][]string{"vendor": accel.VendorNames(), "policy": place.Names()} {
		words, err := json.MarshalIndent(names, "      ", "  ")
		if err != nil {
			return nil, err
		}
		enum := regexp.MustCompile(`("` + key + `": \{\s*"type": "string",\s*"enum": )\[[^]]*\]`)
		if len(enum.FindAll(schema, -1)) != 1 {
			return nil, fmt.Errorf("%s: found no list of names at %q, or several", schemaFile, key)
		}
		schema = enum.ReplaceAll(schema, slices.Concat([]byte("${1}"), words))
	}
	return map[string]string{
		vendorsFile: "# Written by `make generate` from internal/core/accel/vendors.go; edits are lost.\n" + string(vendors),
		schemaFile:  string(schema),
	}, nil
}
