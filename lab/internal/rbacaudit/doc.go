// Package rbacaudit compares the rights that the chart gives to Divvy's accounts
// with those that the programs use: the roles of rendered manifests on one side,
// the API server's audit log on the other. A right that nothing used is one too
// many, and a request that was refused is one too few.
//
// What it says is as good as what ran: it is asked at the end of a whole suite.
// Roles that are not in the manifests, such as Kubernetes' own
// system:kube-scheduler, are not compared.
package rbacaudit
