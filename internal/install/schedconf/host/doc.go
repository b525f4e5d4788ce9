// Package host applies what package schedconf decides to a control-plane node:
// it puts files in place, waits until kube-scheduler is well with them, and goes
// back by itself when it is not.
//
// Every file is written beside its place, synced and renamed, so that nobody ever
// sees half of one; kubelet, which takes every visible file of its folder for a
// pod, sees the manifest alone. What a change needs in order to be undone is on
// disk before the change begins, and a journal says that it has begun. Whatever
// prefix of the steps was done before the power went, Install finishes or undoes
// it, and Uninstall takes it back; the original manifest is never without a copy.
//
// One Host works on a node at a time, others wait; that holds between processes
// and between containers.
package host
