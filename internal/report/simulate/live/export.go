package live

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/core/history"
)

// ExportKind is the kind of a file with decisions and the cluster that they are about.
const ExportKind = "DecisionExport"

// export is the form of such a file.
type export struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Record     json.RawMessage `json:"record"`
	Cluster    json.RawMessage `json:"cluster"`
}

// WriteExport writes a record of decisions with the cluster.
func (l *Cluster) WriteExport(out io.Writer, record []byte) error {
	all, err := l.list()
	if err != nil {
		return err
	}
	cluster, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(export{APIVersion: history.APIVersion, Kind: ExportKind, Record: record, Cluster: cluster})
}

// maxExport bounds such a file, in bytes: a record is up to 26 MB, and 5000 nodes with
// 50 000 pods are some 100 MB.
const maxExport = 512 << 20

// ReadExport reads what WriteExport has written. The name is for errors.
func ReadExport(in io.Reader, name string) (*Cluster, *history.Record, error) {
	return readExport(in, name, maxExport)
}

func readExport(in io.Reader, name string, most int64) (*Cluster, *history.Record, error) {
	data, err := io.ReadAll(io.LimitReader(in, most+1))
	if err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", name, err)
	}
	if int64(len(data)) > most {
		return nil, nil, fmt.Errorf("%s: it is larger than %d bytes, so it is no export of decisions", name, most)
	}
	var e export
	if err := json.Unmarshal(data, &e); err != nil {
		var syntax *json.SyntaxError
		switch {
		case errors.As(err, &syntax) && syntax.Offset >= int64(len(bytes.TrimSpace(data))):
			return nil, nil, fmt.Errorf("%s: the file ends in the middle, after %d bytes; export it again", name, len(data))
		case errors.As(err, &syntax):
			return nil, nil, fmt.Errorf("%s:%d: %w", name, 1+bytes.Count(data[:syntax.Offset], []byte{'\n'}), err)
		}
		return nil, nil, fmt.Errorf("%s: it is no export of decisions: %w", name, err)
	}
	switch {
	case e.Kind != ExportKind:
		return nil, nil, fmt.Errorf("%s: kind is %q; it must be a %s, as \"kubectl divvy explain --export FILE\" writes it", name, e.Kind,
			ExportKind)
	case e.APIVersion != history.APIVersion:
		return nil, nil, fmt.Errorf("%s: apiVersion is %q, and this release reads %s; use the release of kubectl-divvy that wrote it", name,
			e.APIVersion, history.APIVersion)
	}
	var r history.Record
	if err := json.Unmarshal(e.Record, &r); err != nil {
		return nil, nil, fmt.Errorf("%s: record: %w", name, err)
	}
	if err := r.Validate(); err != nil {
		return nil, nil, fmt.Errorf("%s: record: %w", name, err)
	}
	l := &Cluster{}
	_, err = ReadList(bytes.NewReader(e.Cluster), name+": cluster", func(kind string) runtime.Object {
		if kind == "Node" {
			return &v1.Node{}
		}
		return nil
	}, l.add)
	if err == nil && len(l.nodes) == 0 {
		err = fmt.Errorf("%s: cluster: it has no nodes", name)
	}
	return l, &r, err
}
