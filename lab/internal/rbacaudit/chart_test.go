package rbacaudit

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/testing/charttest"
)

// TestEveryAccountIsCompared: the accounts with rights are those whose rights the
// last tests of lab/e2e and lab/e2e/installation compare.
func TestEveryAccountIsCompared(t *testing.T) {
	var manifests []string
	for _, set := range [][]string{
		{"--set", "pool.enabled=true,uninstall.removeLogs=true,extender.replicas=2"}, {"--set", "scheduler.mode=dedicated"},
		{"--set", "scheduler.mode=none"},
	} {
		text, err := charttest.Render(t.Context(), set...)
		if err != nil {
			t.Fatal(err)
		}
		manifests = append(manifests, string(text))
	}
	roles, err := Read(manifests...)
	if err != nil {
		t.Fatal(err)
	}
	var with []string
	for _, g := range roles.Grants {
		with = append(with, g.Account)
	}
	slices.Sort(with)
	with = slices.Compact(with)
	compared := []string{
		"bwki/bitfusion-webhook-deployment", "divvy-system/divvy-extender", "divvy-system/divvy-node", // lab/e2e
		"divvy-system/divvy-schedconf", "divvy-system/divvy-scheduler", "divvy-system/divvy-uninstall", // lab/e2e/installation
	}
	if diff := cmp.Diff(compared, with); diff != "" {
		t.Errorf("accounts (-compared +with rights):\n%s", diff)
	}
	for _, account := range with {
		if !slices.Contains(roles.Accounts, account) {
			t.Errorf("%s has rights and is not made", account)
		}
	}
}
