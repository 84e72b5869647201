//! Debian packages and guest images for the demo and the tests.
//!
//! [`packages`] fetches sets of Debian packages into the user's cache, verified by apt's own signatures.

pub mod apt;
pub mod cache;
pub mod error;
pub mod mirror;
pub mod packages;
pub mod progress;
pub mod recipe;
pub mod tool;

pub use cache::Cache;
pub use error::{Error, Result};
pub use packages::{Fetcher, PackageSet};
