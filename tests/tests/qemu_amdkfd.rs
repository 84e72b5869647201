//! The real amdkfd of the guest's kernel: present without any GPU once amdgpu is loaded.

use virtio_kfd_tests::{Artifacts, Command, Vm, need};

/// On Linux 6.12 `modprobe amdgpu` without an AMD GPU creates /dev/kfd and one topology node, the CPU (seen on Debian's
/// 6.12 kernels; `kfd_init` and `kfd_topology_init` in drivers/gpu/drm/amd/amdkfd).
#[test]
fn amdgpu_without_a_gpu_brings_the_kfd() {
    let artifacts = need!(Artifacts::find());
    let builder = need!(Vm::builder(&artifacts));
    need!(artifacts.qemu());
    need!(artifacts.image());
    let guest = builder.module("amdgpu").boot().unwrap();
    let script = "set -e; test -c /dev/kfd; ls /sys/class/kfd/kfd/topology/nodes; cat /sys/module/amdgpu/initstate; \
                  cat /sys/class/kfd/kfd/topology/nodes/0/gpu_id";
    let seen = guest.run(&Command::shell(script)).unwrap().checked().unwrap();
    assert_eq!(seen.text(), "0\nlive\n0\n");
}
