package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	yaml "go.yaml.in/yaml/v3"
)

// schemaNode is what the tests look at of a JSON schema.
type schemaNode struct {
	Ref                  string                 `json:"$ref"`
	Type                 any                    `json:"type"`
	Description          string                 `json:"description"`
	Enum                 []any                  `json:"enum"`
	Pattern              string                 `json:"pattern"`
	Properties           map[string]*schemaNode `json:"properties"`
	AdditionalProperties json.RawMessage        `json:"additionalProperties"`
	Items                *schemaNode            `json:"items"`
	AnyOf                []*schemaNode          `json:"anyOf"`
	AllOf                []*schemaNode          `json:"allOf"`
	Definitions          map[string]*schemaNode `json:"definitions"`
}

func readSchema(t *testing.T) *schemaNode {
	t.Helper()
	data, err := os.ReadFile(chartDir + "/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var s schemaNode
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	return &s
}

// UnmarshalJSON takes the schemas true and false too, which describe nothing.
func (s *schemaNode) UnmarshalJSON(data []byte) error {
	if text := string(data); text == "true" || text == "false" {
		return nil
	}
	type plain schemaNode
	return json.Unmarshal(data, (*plain)(s))
}

// follow returns what a node refers to, with its own description if it has one.
func (s *schemaNode) follow(t *testing.T, node *schemaNode) *schemaNode {
	t.Helper()
	for node.Ref != "" {
		target := s.Definitions[strings.TrimPrefix(node.Ref, "#/definitions/")]
		if target == nil {
			t.Fatalf("the schema has no %s", node.Ref)
		}
		merged := *target
		if node.Description != "" {
			merged.Description = node.Description
		}
		node = &merged
	}
	return node
}

// kubernetes are objects of Kubernetes' own, which the API server checks.
var kubernetes = []string{"affinity", "valueFrom", "namespaceSelector", "podSelector", "ipBlock", "Affinity", "catalog"}

// TestSchemaAndValuesAgree: every value has its place in the schema, every key of
// the schema its default in values.yaml, with a sentence that says what it is; and a
// key that is in neither is an error everywhere.
func TestSchemaAndValuesAgree(t *testing.T) {
	schema := readSchema(t)
	data, err := os.ReadFile(chartDir + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(data, &values); err != nil {
		t.Fatal(err)
	}
	// check looks at a node; has says whether value is one of values.yaml.
	var check func(path string, node *schemaNode, value any, has bool)
	check = func(path string, node *schemaNode, value any, has bool) {
		node = schema.follow(t, node)
		if node.Description == "" && !strings.HasSuffix(path, "[]") {
			t.Errorf("%s has no description in values.schema.json", path)
		}
		if node.Type == nil && len(node.AnyOf)+len(node.AllOf)+len(node.Enum) == 0 {
			t.Errorf("%s has no type in values.schema.json", path)
		}
		own := slices.ContainsFunc(kubernetes, func(k string) bool { return strings.HasSuffix(path, k) })
		if node.Type == "object" && len(node.AdditionalProperties) == 0 && !own {
			t.Errorf("%s takes every key: values.schema.json says nothing about additionalProperties", path)
		}
		inner, isMap := value.(map[string]any)
		for key, v := range inner {
			property := node.Properties[key]
			if property == nil {
				// A map of a user's own keys, such as a node selector's.
				if extra := string(node.AdditionalProperties); (extra == "" || extra == "false") && !own {
					t.Errorf("%s.%s is in values.yaml and not in values.schema.json", path, key)
				}
				continue
			}
			check(path+"."+key, property, v, has)
		}
		for _, key := range slices.Sorted(maps.Keys(node.Properties)) {
			property := node.Properties[key]
			_, there := inner[key]
			name := strings.TrimPrefix(path+"."+key, ".")
			switch {
			case there || former[name] != "":
			case has && isMap && len(inner) > 0 && !optional[name] && !ofOthers(name):
				t.Errorf("%s is in values.schema.json and not in values.yaml", name)
			default:
				check(path+"."+key, property, nil, false)
			}
		}
		if node.Items != nil {
			check(path+"[]", node.Items, nil, false)
		}
	}
	for key, value := range values {
		property := schema.Properties[key]
		if property == nil {
			t.Errorf("%s is in values.yaml and not in values.schema.json", key)
			continue
		}
		check(key, property, value, true)
	}
	for key := range schema.Properties {
		if _, ok := values[key]; !ok && key != "global" && former[key] == "" {
			t.Errorf("%s is in values.schema.json and not in values.yaml", key)
		}
	}
}

// optional are keys without a default, because their absence means something.
var optional = map[string]bool{}

// ofOthers reports whether a key belongs to an object of Kubernetes, whose every
// field need not be in values.yaml.
func ofOthers(name string) bool {
	return slices.ContainsFunc([]string{".resources.", "Affinity.", "affinity.", "tolerations", "extraEnv"},
		func(part string) bool { return strings.Contains(name, part) })
}

// former are keys of GCUShare's charts, with what the chart says about each.
var former = map[string]string{
	"replicaCount":     "extender.replicas",
	"image.repository": "set image.registry",
	"image.name":       "set node.image.repository and extender.image.repository",
	"imagePullSecrets": "set image.pullSecrets",
	"nameOverride":     "object names are fixed",
	"fullnameOverride": "object names are fixed",
	"deployName":       "object names are fixed",
}

// TestValuesOfTheGuide: the guide's file of values, as it is, is refused with a line
// for each value that has another name, and is taken with those names.
func TestValuesOfTheGuide(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	guide := t.TempDir() + "/values.yaml"
	write(t, guide, `replicaCount: 1

image:
  repository: artifact.enflame.cn/enflame_docker_images/enflame
  name: gcushare-device-plugin
  pullPolicy: IfNotPresent
  # Overrides the image tag whose default is the chart appVersion.
  tag: "latest"

imagePullSecrets: []
nameOverride: ""
fullnameOverride: ""
deployName: "gcushare-device-plugin"
memoryUnit: "0.1"
`)
	_, err = template(t.Context(), program, chartDir, []string{"--values", guide})
	for key, want := range former {
		if err == nil || !strings.Contains(err.Error(), "\n  "+key+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not told with %q: %v", key, want, err)
		}
	}
	text := string(rendered(t,
		"--set", "image.registry=artifact.enflame.cn/enflame_docker_images/enflame,image.tag=latest,image.pullPolicy=IfNotPresent,"+
			"node.image.repository=gcushare-device-plugin",
		"--set-string", "memoryUnit=0.1"))
	for _, want := range []string{"image: artifact.enflame.cn/enflame_docker_images/enflame/gcushare-device-plugin:latest",
		`memoryUnit: "0.1"`} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing", want)
		}
	}
}

// TestBadValuesAreToldInASentence: what helm says names the value, and what is right.
func TestBadValuesAreToldInASentence(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ set, want string }{
		{`memoryUnit=0.1`, "at '/memoryUnit': got number, want string"},
		{`memoryUnit="2"`, "at '/memoryUnit': value must be one of '1', '0.1', '0.01', '0.001', '1/6'"},
		{`image="x"`, "at '/image': got string, want object"},
		{`image.pullPolicy="Sometimes"`, "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"},
		{`image.pullSecrets=["login"]`, "at '/image/pullSecrets/0': got string, want object"},
		{`image.pullSecrets=[{"nam":"login"}]`, "at '/image/pullSecrets/0': missing property 'name'"},
		{`sharedResources={"name":"a.b/c"}`, "at '/sharedResources': got object, want array"},
		{`sharedResources=[{"vendor":"nvidia"}]`, "at '/sharedResources/0': missing property 'name'"},
		{`sharedResources=[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"timeSlicing","replicas":"4"}]`,
			"at '/sharedResources/0/replicas': got string, want integer"},
		{`node.tolerations=[{"key":"a","operator":"Exist"}]`,
			"at '/node/tolerations/0/operator': value must be one of 'Exists', 'Equal', 'Lt', 'Gt'"},
		{`node.tolerations=["a"]`, "at '/node/tolerations/0': got string, want object"},
		{`node.tolerations=[{"kee":"a"}]`, "at '/node/tolerations/0': additional properties 'kee' not allowed"},
		{`node.nodeSelector={"a":true}`, "at '/node/nodeSelector/a': got boolean, want null or string"},
		{`node.nodeSelector="a=b"`, "at '/node/nodeSelector': got string, want object"},
		{`node.affinity={"nodeAfinity":{}}`, "at '/node/affinity': additional properties 'nodeAfinity' not allowed"},
		{`node.resources={"limit":{"memory":"1Gi"}}`, "at '/node/resources': additional properties 'limit' not allowed"},
		{`node.resources={"limits":{"memory":"1 Gi"}}`, "at '/node/resources/limits/memory': '1 Gi' does not match pattern"},
		{`node.extraEnv=[{"name":"A","value":1}]`, "at '/node/extraEnv/0/value': got number, want string"},
		{`node.extraEnv={"A":"b"}`, "at '/node/extraEnv': got object, want array"},
		{`node.podAnnotations={"a":1}`, "at '/node/podAnnotations/a': got number, want string"},
		{`node.maxUnavailable="ten"`, "at '/node/maxUnavailable'"},
		{`node.maxSurge=0`, "at '/node/maxSurge': minimum: got 0, want 1"},
		{`node.healthInterval=5`, "at '/node/healthInterval': got number, want string"},
		{`node.kubeletDir="var/lib"`, "at '/node/kubeletDir': 'var/lib' does not match pattern '^/'"},
		{`node.logLevel="verbose"`, "at '/node/logLevel': value must be one of 'error', 'warn', 'info', 'debug'"},
		{`node.restrictToOwnNode="yes"`, "at '/node/restrictToOwnNode': got string, want boolean"},
		{`extender.replicas=-1`, "at '/extender/replicas': minimum: got -1, want 0"},
		{`extender.replicas="2"`, "at '/extender/replicas': got string, want null or integer"},
		{`extender.policy="pack"`, "at '/extender/policy': value must be one of 'binpack', 'spread', 'fragmentation'"},
		{`extender.allowBindFrom="10.0.0.0/8"`, "at '/extender/allowBindFrom': got string, want array"},
		{`extender.runAsUser="root"`, "at '/extender/runAsUser': got string, want null or integer"},
		{`scheduler.mode="managed"`, "at '/scheduler/mode': value must be one of 'extender', 'replace', 'dedicated', 'none'"},
		{`pool.namespace="Pool"`, "at '/pool/namespace': 'Pool' does not match pattern"},
		{`pool.webhook.timeoutSeconds=60`, "at '/pool/webhook/timeoutSeconds': maximum: got 60, want 30"},
		{`pool.node.units="1000"`, "at '/pool/node/units': got string, want integer"},
		{`admissionPolicies.enabled="false"`, "at '/admissionPolicies/enabled': got string, want boolean"},
		{`admissionPolicies=false`, "at '/admissionPolicies': got boolean, want object"},
		{`networkPolicy.apiServer.cidrs=["10.0.0.1"]`, "at '/networkPolicy/apiServer/cidrs/0': '10.0.0.1' does not match pattern"},
		{`networkPolicy.apiServer.ports=["443"]`, "at '/networkPolicy/apiServer/ports/0': got string, want integer"},
		{`networkPolicy.apiServer.ports=[]`, "at '/networkPolicy/apiServer/ports': minItems: got 0, want 1"},
		{`networkPolicy.prometheus=[{"namespace":"monitoring"}]`,
			"at '/networkPolicy/prometheus/0': additional properties 'namespace' not allowed"},
		{`podDisruptionBudget.enabled=1`, "at '/podDisruptionBudget/enabled': got number, want boolean"},
		{`metrics.scrapeAnnotations="on"`, "at '/metrics/scrapeAnnotations': got string, want boolean"},
		{`nods={}`, "additional properties 'nods' not allowed"},
	} {
		text, err := template(t.Context(), program, chartDir, []string{"--set-json", tt.set})
		if err == nil {
			t.Errorf("%s: rendered %d bytes", tt.set, len(text))
		} else if !strings.Contains(fmt.Sprint(err), tt.want) {
			t.Errorf("%s: %v\nwant: %s", tt.set, err, tt.want)
		}
	}
}
