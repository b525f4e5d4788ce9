package secrets

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/divvy-gpu/divvy/internal/platform/informers"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// stores are what is known of the cluster, each object cut down to what is
// looked at.
type stores struct {
	pods, namespaces cache.SharedIndexInformer
	secrets          map[string]cache.SharedIndexInformer // by name
}

type pod struct {
	metav1.ObjectMeta
	// secrets are those of secretNames that it mounts.
	secrets []string
	// ended says that it runs no more, waiting that it has not begun to.
	ended, waiting bool
}

type namespace struct {
	metav1.ObjectMeta
	labels      map[string]string
	terminating bool
}

// secret is what matters of a secret. Only those of the source namespace keep
// their data.
type secret struct {
	metav1.ObjectMeta
	namespace, name, resourceVersion string
	uid                              types.UID
	annotations                      map[string]string
	// hash is over type and data.
	hash string
	// ours says that it is a copy made by a Keeper.
	ours bool
	kind corev1.SecretType
	data map[string][]byte
}

func newStores(c Config) stores {
	s := stores{
		pods: coreinformers.NewFilteredPodInformer(c.Client, metav1.NamespaceAll, 0,
			cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc},
			func(o *metav1.ListOptions) { o.LabelSelector = pool.ConvertedLabel + "=true" }),
		namespaces: coreinformers.NewNamespaceInformer(c.Client, 0, nil),
		secrets:    map[string]cache.SharedIndexInformer{},
	}
	for _, name := range secretNames {
		s.secrets[name] = coreinformers.NewFilteredSecretInformer(c.Client, metav1.NamespaceAll, 0, nil, informers.ByName(name))
	}
	return s
}

func (s stores) namespace(name string) *namespace {
	obj, _, _ := s.namespaces.GetStore().GetByKey(name)
	ns, _ := obj.(*namespace)
	return ns
}

func (s stores) secret(name, namespace string) *secret {
	informer, ok := s.secrets[name]
	if !ok {
		return nil
	}
	obj, _, _ := informer.GetStore().GetByKey(namespace + "/" + name)
	found, _ := obj.(*secret)
	return found
}

// podsOf are the pods of a namespace, oldest name first.
func (s stores) podsOf(namespace string) []*pod {
	objs, err := s.pods.GetIndexer().ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return nil // There is such an index.
	}
	var out []*pod
	for _, obj := range objs {
		if p, ok := obj.(*pod); ok {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *pod) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func (k *Keeper) copies() float64 {
	n := 0
	for _, informer := range k.stores.secrets {
		for _, obj := range informer.GetStore().List() {
			if s, ok := obj.(*secret); ok && s.ours {
				n++
			}
		}
	}
	return float64(n)
}

// watch adds the informers to the group: what they keep, and what changes lead to.
func (k *Keeper) watch() {
	k.informers.Add("pods", k.stores.pods, k.trim, k.changed)
	k.informers.Add("namespaces", k.stores.namespaces, k.trim, k.changed)
	for _, name := range secretNames {
		k.informers.Add("secrets named "+name, k.stores.secrets[name], k.trim, k.changed)
	}
}

// changed queues the namespaces for which a change matters.
func (k *Keeper) changed(before, after any) {
	switch obj := cmp.Or(after, before).(type) {
	case *pod:
		if old, ok := before.(*pod); ok && after != nil && old.ended == obj.ended && old.waiting == obj.waiting && old.UID == obj.UID {
			return
		}
		if after == nil {
			k.forgetPod(string(obj.UID))
		}
		k.queue.Add(obj.Namespace)
	case *namespace:
		if old, ok := before.(*namespace); ok && after != nil && old.terminating == obj.terminating && maps.Equal(old.labels, obj.labels) {
			return
		}
		k.queue.Add(obj.Name)
	case *secret:
		if obj.namespace != k.config.SourceNamespace {
			k.setMade(obj.namespace, obj.name, false)
			k.queue.Add(obj.namespace)
			return
		}
		if old, ok := before.(*secret); ok && after != nil && old.hash == obj.hash {
			return
		}
		for _, namespace := range k.stores.pods.GetIndexer().ListIndexFuncValues(cache.NamespaceIndex) {
			k.queue.Add(namespace)
		}
	}
}

func (k *Keeper) trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Pod:
		p := &pod{
			ObjectMeta: slim(o.ObjectMeta),
			ended:      o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed,
			waiting:    o.Status.Phase == corev1.PodPending || o.Status.Phase == "",
		}
		for _, name := range secretNames {
			if slices.ContainsFunc(o.Spec.Volumes, func(v corev1.Volume) bool { return mounts(v, name) }) {
				p.secrets = append(p.secrets, name)
			}
		}
		return p, nil
	case *corev1.Namespace:
		return &namespace{
			ObjectMeta: slim(o.ObjectMeta), labels: o.Labels,
			terminating: o.DeletionTimestamp != nil || o.Status.Phase == corev1.NamespaceTerminating,
		}, nil
	case *corev1.Secret:
		s := &secret{
			ObjectMeta: slim(o.ObjectMeta), namespace: o.Namespace, name: o.Name, resourceVersion: o.ResourceVersion,
			uid: o.UID, annotations: o.Annotations, hash: hashOf(o), ours: k.ours(o), kind: o.Type,
		}
		if o.Namespace == k.config.SourceNamespace {
			s.data, s.annotations = o.Data, nil
		}
		return s, nil
	}
	return obj, nil
}

func slim(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}

// mounts reports whether a volume holds the secret of a name, alone or among
// others.
func mounts(v corev1.Volume, name string) bool {
	if v.Secret != nil && v.Secret.SecretName == name {
		return true
	}
	return v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
		return s.Secret != nil && s.Secret.Name == name
	})
}

// ours reports whether a secret is a copy that a Keeper made of this source.
func (k *Keeper) ours(s *corev1.Secret) bool {
	return s.Namespace != k.config.SourceNamespace && s.Labels[ManagedByLabel] == ManagedBy &&
		s.Annotations[SourceAnnotation] == k.config.SourceNamespace+"/"+s.Name
}

func (k *Keeper) copyOf(source *secret, namespace string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: source.name,
			Labels: map[string]string{ManagedByLabel: ManagedBy},
			Annotations: map[string]string{
				SourceAnnotation:        k.config.SourceNamespace + "/" + source.name,
				SourceVersionAnnotation: source.resourceVersion,
				SourceHashAnnotation:    source.hash,
			},
		},
		Type: copyType(source.kind),
		Data: maps.Clone(source.data),
	}
}

// copyType is the type of a copy. Kubernetes' own types mean something, such as
// that a token of an account is to be put in, so copies have none of them.
func copyType(t corev1.SecretType) corev1.SecretType {
	if t == "" || strings.Contains(string(t), "kubernetes.io/") {
		return corev1.SecretTypeOpaque
	}
	return t
}

// hashOf is a SHA-256 over the type of copies and the data, each part with its length before it.
func hashOf(s *corev1.Secret) string {
	h := sha256.New()
	part := func(b []byte) {
		h.Write([]byte(strconv.Itoa(len(b)) + ":"))
		h.Write(b)
	}
	part([]byte(copyType(s.Type)))
	for _, key := range slices.Sorted(maps.Keys(s.Data)) {
		part([]byte(key))
		part(s.Data[key])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// precisely makes a deletion fail when the object is not the one that was seen.
func precisely(uid types.UID, resourceVersion string) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &resourceVersion}}
}
