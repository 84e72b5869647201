//! Debian packages and guest images for the demo and the tests.
//!
//! [`packages`] fetches sets of Debian packages into the user's cache, verified by apt's own signatures; [`image`] makes
//! bootable guests of them. What goes into either stands in `recipes/`.

pub mod apt;
pub mod cache;
pub mod cpio;
pub mod error;
pub mod image;
pub mod kmod;
pub mod layer;
pub mod mirror;
pub mod packages;
pub mod progress;
pub mod recipe;
pub mod tool;

pub use cache::Cache;
pub use cpio::Archive;
pub use error::{Error, Result};
pub use image::BaseImage;
pub use layer::Layer;
pub use packages::{Fetcher, PackageSet};
