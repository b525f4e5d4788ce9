package doctor

import (
	"slices"
)

// Groups of checks, in the order in which they are shown.
const (
	groupInstallation = "installation"
	groupPrograms     = "programs"
	groupNodes        = "nodes"
	groupScheduling   = "scheduling"
	groupAdmission    = "admission and rights"
	groupPods         = "pods"
	groupPool         = "remote pool"
)

// Check is one question to a snapshot.
type Check struct {
	Name, Group string
	// Title says what holds when all is well.
	Title string
	// Needs are the sources without which the check cannot be made.
	Needs []Source
	// skip says why there is nothing to check, "" when there is.
	skip func(*Snapshot) string
	run  func(*Snapshot, *findings)
}

// Checks returns all checks, in the order in which they are shown.
func Checks() []Check { return slices.Clone(checks) }

var checks = []Check{
	{
		Name: "release", Group: groupInstallation, Title: "Divvy is installed once, and its last installation or upgrade succeeded",
		Needs: []Source{SourceWorkloads}, run: checkRelease,
	},
	{
		Name: "objects", Group: groupInstallation, Title: "all objects of the release exist, with the rules that were installed",
		Needs: []Source{SourceRelease}, skip: withoutManifest, run: checkObjects,
	},
	{
		Name: "leftovers", Group: groupInstallation, Title: "nothing is left of another release or of programs that Divvy replaces",
		Needs: []Source{SourceRoles, SourceWorkloads, SourceNodes, SourcePods, SourceAdmission, SourcePolicies}, run: checkLeftovers,
	},
	{
		Name: "workloads", Group: groupPrograms, Title: "all programs run and are ready",
		Needs: []Source{SourceWorkloads, SourcePods}, skip: nothingInstalled, run: checkWorkloads,
	},
	{
		Name: "versions", Group: groupPrograms, Title: "all programs, and this one, have the same version",
		Needs: []Source{SourceWorkloads, SourcePods}, skip: nothingInstalled, run: checkVersions,
	},
	{
		Name: "configuration", Group: groupPrograms, Title: "the configurations of divvy-node are valid",
		Needs: []Source{SourceWorkloads, SourceConfigMaps}, skip: withoutNode, run: checkConfiguration,
	},
	{
		Name: "grant-key", Group: groupPrograms, Title: "the key that signs planned allocations exists and is long enough",
		Needs: []Source{SourceWorkloads, SourceSecrets}, skip: withoutNode, run: checkGrantKey,
	},
	{
		Name: "node-labels", Group: groupNodes, Title: "every labelled node runs divvy-node",
		Needs: []Source{SourceWorkloads, SourceNodes, SourcePods}, skip: withoutNode, run: checkNodeLabels,
	},
	{
		Name: "node-ready", Group: groupNodes, Title: "the nodes that share devices are ready",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads}, skip: withoutNode, run: checkNodeReady,
	},
	{
		Name: "inventory", Group: groupNodes, Title: "kubelet offers the devices that divvy-node found",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads}, skip: withoutNode, run: checkInventory,
	},
	{
		Name: "devices", Group: groupNodes, Title: "all devices are healthy and no units are withheld",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads}, skip: withoutNode, run: checkDevices,
	},
	{
		Name: "limits", Group: groupNodes, Title: "containers are isolated as configured",
		Needs: []Source{SourceNodes}, skip: withoutNode, run: checkLimits,
	},
	{
		Name: "other-plugins", Group: groupNodes, Title: "no other device plugin serves the same devices",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads}, skip: withoutNode, run: checkOtherPlugins,
	},
	{
		Name: "node-setup", Group: groupNodes, Title: "containers get NVIDIA's GPUs as they are allocated, and in no other way",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads}, skip: withoutNode, run: checkSetup,
	},
	{
		Name: "claim-devices", Group: groupNodes, Title: "the devices for ResourceClaims are published as they are configured",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads, SourceClaims}, skip: withoutClaims, run: checkClaimDevices,
	},
	{
		Name: "kubelet", Group: groupNodes, Title: "the version of kubelet is supported, and kubelet accepts the number of units",
		Needs: []Source{SourceNodes, SourceConfigMaps, SourceWorkloads}, skip: nothingInstalled, run: checkKubelet,
	},
	{
		Name: "extender", Group: groupScheduling, Title: "the extender responds, and has read all nodes and pods",
		Needs: []Source{SourceWorkloads, SourceServices, SourceExtender}, skip: withoutExtender, run: checkExtender,
	},
	{
		Name: "scheduler", Group: groupScheduling, Title: "kube-scheduler calls the extender",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads, SourceAdmission}, skip: withoutExtender, run: checkScheduler,
	},
	{
		Name: "webhooks", Group: groupAdmission, Title: "the API server reaches Divvy's webhooks and trusts them",
		Needs: []Source{SourceAdmission, SourceServices, SourceSecrets}, skip: withoutWebhooks, run: checkWebhooks,
	},
	{
		Name: "certificates", Group: groupAdmission, Title: "certificates are valid and have the right names",
		Needs: []Source{SourceSecrets, SourceConfigMaps}, skip: nothingInstalled, run: checkCertificates,
	},
	{
		Name: "policies", Group: groupAdmission, Title: "every admission policy of Divvy is bound and denies",
		Needs: []Source{SourcePolicies}, skip: nothingInstalled, run: checkPolicies,
	},
	{
		Name: "rbac", Group: groupAdmission, Title: "every program has the permissions of its role",
		Needs: []Source{SourceRelease, SourceReviews}, skip: withoutManifest, run: checkAccess,
	},
	{
		Name: "waiting", Group: groupPods, Title: "no pod is waiting for shared devices",
		Needs: []Source{SourcePods, SourceNodes, SourceWaiting}, skip: nothingInstalled, run: checkWaiting,
	},
	{
		Name: "isolation", Group: groupPods, Title: "no pod is waiting for an isolation that no node states",
		Needs: []Source{SourcePods, SourceNodes, SourceWaiting}, skip: withoutExtender, run: checkIsolation,
	},
	{
		Name: "failed", Group: groupPods, Title: "no pod was rejected by its node",
		Needs: []Source{SourcePods}, skip: nothingInstalled, run: checkFailed,
	},
	{
		Name: "claims", Group: groupPods, Title: "the claims of pods can be served and are prepared",
		Needs: []Source{SourceNodes, SourcePods, SourceWorkloads, SourceClaims}, skip: withoutClaims, run: checkClaims,
	},
	{
		Name: "grants", Group: groupPods, Title: "allocations of pods are consistent",
		Needs: []Source{SourcePods, SourceNodes}, skip: withoutExtender, run: checkGrants,
	},
	{
		Name: "pool-token", Group: groupPool, Title: "the token of the pool exists and is valid",
		Needs: []Source{SourceToken, SourceWorkloads}, skip: withoutPool, run: checkPoolToken,
	},
	{
		Name: "pool-copies", Group: groupPool, Title: "namespaces with pods that use the pool are allowed to, and have the token",
		Needs: []Source{SourceToken, SourceNamespaces, SourcePods, SourceWorkloads}, skip: withoutPool, run: checkPoolCopies,
	},
	{
		Name: "pool-catalog", Group: groupPool, Title: "the catalog of clients is valid",
		Needs: []Source{SourceConfigMaps, SourceWorkloads}, skip: withoutPool, run: checkPoolCatalog,
	},
	{
		Name: "pool-units", Group: groupPool, Title: "nodes offer units of the pool, and quotas limit the right resource",
		Needs: []Source{SourceNodes, SourceQuotas, SourceWorkloads}, skip: withoutPool, run: checkPoolUnits,
	},
}

// Examine makes all checks. It is a function of the snapshot alone.
func Examine(s *Snapshot) Report {
	report := Report{Tool: s.Tool, Kubernetes: clean(s.Kubernetes)}
	if r := s.Release(); r != nil {
		report.Release, report.Namespace = clean(r.Name), clean(r.Namespace)
	}
	for _, c := range checks {
		report.Results = append(report.Results, c.examine(s))
	}
	return report
}

func (c Check) examine(s *Snapshot) Result {
	result := Result{Check: c.Name, Group: c.Group, Title: c.Title, Severity: OK}
	f := findings{check: c.Name}
	for _, source := range c.Needs {
		if why, failed := s.Failed[source]; failed {
			f.add(Unknown, string(source), why, "") // the summary says what to do
		}
	}
	if len(f.found) == 0 {
		if c.skip != nil {
			if result.Skipped = c.skip(s); result.Skipped != "" {
				return result
			}
		}
		c.run(s, &f)
	}
	slices.SortStableFunc(f.found, byObject)
	result.Findings = slices.CompactFunc(f.found, func(a, b Finding) bool { return a.Object == b.Object && a.Problem == b.Problem })
	for _, found := range result.Findings {
		result.Severity = worse(result.Severity, found.Severity)
	}
	return result
}

func nothingInstalled(s *Snapshot) string {
	if s.Release() == nil {
		return "Divvy is not installed"
	}
	return ""
}

func withoutManifest(s *Snapshot) string {
	switch r := s.Release(); {
	case r == nil:
		return "Divvy is not installed"
	case !r.Helm:
		return "Divvy was not installed by helm, so there is no record of its objects; compare them with kubectl diff -f and its manifest"
	}
	return ""
}

func withoutNode(s *Snapshot) string {
	if nothing := nothingInstalled(s); nothing != "" {
		return nothing
	}
	if program(s.Release(), s.DaemonSets, nameNode) == nil {
		return "divvy-node is not installed"
	}
	return ""
}

func withoutExtender(s *Snapshot) string {
	if nothing := nothingInstalled(s); nothing != "" {
		return nothing
	}
	if !s.hasExtender() {
		return "no resource is shared by memory, so no extender is installed"
	}
	return ""
}

func withoutWebhooks(s *Snapshot) string {
	if nothing := nothingInstalled(s); nothing != "" {
		return nothing
	}
	if len(s.webhooks()) == 0 {
		return "no webhook is installed"
	}
	return ""
}

func withoutPool(s *Snapshot) string {
	if nothing := nothingInstalled(s); nothing != "" {
		return nothing
	}
	if program(s.Release(), s.Deployments, namePoolHook) == nil {
		return "no remote pool is used"
	}
	return ""
}
