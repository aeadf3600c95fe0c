// Provisioner creates a folder for each claim of a storage class and deletes it with the claim: provisioner NAME FOLDER.
// All nodes mount FOLDER, a folder of the host, at the same path, so pods on several nodes can share a volume. The content
// of FOLDER/initial, if it exists, is copied into each new volume.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

type folders struct{ root string }

// Provision may be repeated after a crash: a folder with the final name is complete.
func (f folders) Provision(_ context.Context, options controller.ProvisionOptions) (*v1.PersistentVolume, controller.ProvisioningState, error) {
	claim := options.PVC
	path := filepath.Join(f.root, fmt.Sprintf("%s-%s-%s", claim.Namespace, claim.Name, options.PVName))
	if err := create(path, filepath.Join(f.root, "initial")); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	directory := v1.HostPathDirectory
	return &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: options.PVName},
		Spec: v1.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			AccessModes:                   claim.Spec.AccessModes,
			Capacity:                      v1.ResourceList{v1.ResourceStorage: claim.Spec.Resources.Requests[v1.ResourceStorage]},
			PersistentVolumeSource:        v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: path, Type: &directory}},
		},
	}, controller.ProvisioningFinished, nil
}

// Delete refuses a path that Provision cannot have chosen.
func (f folders) Delete(_ context.Context, volume *v1.PersistentVolume) error {
	path := volume.Spec.HostPath.Path
	if filepath.Dir(path) != f.root || filepath.Clean(path) != path {
		return fmt.Errorf("%s is no folder of a claim in %s", path, f.root)
	}
	return os.RemoveAll(path)
}

func create(path, initial string) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	begun := path + ".begun"
	if err := os.RemoveAll(begun); err != nil {
		return err
	}
	if err := os.Mkdir(begun, 0o777); err != nil {
		return err
	}
	if err := os.CopyFS(begun, os.DirFS(initial)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Rename(begun, path)
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: provisioner NAME FOLDER")
		os.Exit(2)
	}
	// Trainers run as an unprivileged user, and kubelet does not change the owner of a hostPath.
	syscall.Umask(0)
	config, err := rest.InClusterConfig()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	ctx := context.Background()
	// One replica; and a volume's name follows from its claim's uid, so a second one would do no harm.
	controller.NewProvisionController(
		ctx, kubernetes.NewForConfigOrDie(config), os.Args[1], folders{os.Args[2]}, controller.LeaderElection(false),
	).Run(ctx)
}
