//! `libkfd_preload.so`: `LD_PRELOAD` it in a guest, and the process has the host's `/dev/kfd`, for runtimes that carry
//! their thunk inside (ROCr 6.4 and later).
//!
//! It must be built by itself (`cargo build -p kfd-preload`): together with guest-thunk cargo gives it that crate's C
//! functions as well, and libdrm's names among them would stand before the program's own libdrm.

use std::error::Error;

use guest_kfd::GuestKfd;
use kfd_seam::{KfdService, Preload};

kfd_seam::preload!(Preload {
    name: "virtio-kfd",
    prefixes: kfd_seam::sysfs::PREFIXES,
    shared: |_| None,
    service: host,
});

fn host() -> Result<Box<dyn KfdService>, Box<dyn Error + Send + Sync>> {
    Ok(Box::new(GuestKfd::connect()?))
}
