//! `libkfd_model_preload.so`: `LD_PRELOAD` it, and the process has the KFD model's GPU.

use std::error::Error;

use kfd_model::Model;
use kfd_seam::{KfdService, Preload};

kfd_seam::preload!(Preload {
    name: "kfd-model",
    prefixes: kfd_seam::sysfs::PREFIXES,
    shared: kfd_model::dmabuf::recognise,
    service: model,
});

fn model() -> Result<Box<dyn KfdService>, Box<dyn Error + Send + Sync>> {
    Ok(Box::new(Model::from_environment()?))
}
