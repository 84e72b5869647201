//! `libkfd_model_preload.so`: `LD_PRELOAD` it, and the process has the KFD model's GPU.

use std::error::Error;

use kfd_model::Model;
use kfd_seam::{KfdService, Preload};

kfd_seam::preload!(Preload {
    name: "kfd-model",
    prefixes: PREFIXES,
    shared: kfd_model::dmabuf::recognise,
    service: model,
});

/// Where the files of [`kfd_model::sysfs`] lie.
const PREFIXES: &[&str] = &[
    "/dev/kfd",
    "/dev/dri",
    "/proc/modules",
    "/sys/bus/pci/devices",
    "/sys/class/drm",
    "/sys/class/kfd",
    "/sys/dev/char",
    "/sys/devices/pci*",
    "/sys/devices/virtual/kfd",
    "/sys/module/amdgpu",
];

fn model() -> Result<Box<dyn KfdService>, Box<dyn Error + Send + Sync>> {
    Ok(Box::new(Model::from_environment()?))
}
