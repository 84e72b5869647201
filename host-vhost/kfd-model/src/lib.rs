//! A software KFD with a software GPU, behind [`kfd_seam::KfdService`]: topology files, ioctls, mmaps, events,
//! memory and page tables of amdkfd and the amdgpu render node, as Linux 6.12 has them, for the process that it is
//! loaded into. The packet processors ([`engine`]) are not connected yet: queues cannot be created.
//!
//! What differs from the kernel on purpose stands in [`kfd`] and [`render`].

pub mod arena;
pub mod clock;
pub mod debug;
mod descriptors;
pub mod dmabuf;
pub mod engine;
pub mod events;
mod ids;
pub mod kfd;
pub mod ledger;
mod locks;
pub mod machine;
mod model;
pub mod object;
mod page_flags;
pub mod process;
pub mod profile;
pub mod render;
pub mod shared_machine;
pub mod smi;
pub mod space;
pub mod svm;
pub mod sysfs;
pub mod topology;
mod user;

pub use model::{Model, ModelError};
