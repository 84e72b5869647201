//! What the tests run on: programs of this workspace and package sets of the cache.
//!
//! `cargo xtask test` builds all of it first and says by environment variables where it lies. Without the variables the
//! places of a build by hand are looked at. Nothing is built or downloaded here.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use virtio_kfd_images::{Archive, BaseImage, Cache, Layer, image, packages};

use crate::qemu::Qemu;

/// Names the directory with `vhost-user-kfd`, `kfd-worker` and `libkfd_model_preload.so`.
pub const PROGRAMS_VARIABLE: &str = "VIRTIO_KFD_BIN_DIR";

/// Names the linked thunk, `libhsakmt.so.1`.
pub const THUNK_VARIABLE: &str = "VIRTIO_KFD_THUNK";

/// Names the statically linked guest agent.
pub const AGENT_VARIABLE: &str = "VIRTIO_KFD_AGENT";

/// Target triple under which the agent is built, so that its static linking concerns nothing else.
pub const AGENT_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Finds artifacts; each method answers with the reason when its artifact is not there.
#[derive(Debug, Clone)]
pub struct Artifacts {
    cache: Cache,
    target: PathBuf,
}

impl Artifacts {
    /// The artifacts that belong to the running test program.
    ///
    /// # Errors
    /// No cache directory, or a test program that does not lie in a cargo target directory.
    pub fn find() -> Result<Self> {
        let own = std::env::current_exe().context("path of the test program")?;
        // target/PROFILE/deps/PROGRAM, or target/PROFILE/PROGRAM for one that is no test
        let above = if own.parent().is_some_and(|parent| parent.ends_with("deps")) { 3 } else { 2 };
        let target =
            own.ancestors().nth(above).context("a test program outside of a target directory")?.to_owned();
        Ok(Self { cache: Cache::open()?, target })
    }

    /// The artifacts, if all is there that a test with a daemon on the model needs: these programs and libraries of this
    /// workspace besides, and these package sets.
    ///
    /// # Errors
    /// What has not been built or is not in the cache.
    pub fn for_daemon(programs: &[&str], sets: &[&str]) -> Result<Self> {
        let artifacts = Self::find()?;
        for name in ["vhost-user-kfd", "kfd-worker", "libkfd_model_preload.so"].iter().chain(programs) {
            artifacts.program(name)?;
        }
        for set in sets {
            artifacts.packages(set)?;
        }
        Ok(artifacts)
    }

    /// As [`for_daemon`](Self::for_daemon), with our thunk.
    ///
    /// # Errors
    /// What has not been built or is not in the cache.
    pub fn for_thunk(programs: &[&str], sets: &[&str]) -> Result<Self> {
        let artifacts = Self::for_daemon(programs, sets)?;
        artifacts.thunk()?;
        Ok(artifacts)
    }

    /// As [`for_daemon`](Self::for_daemon), with what a guest needs: agent, QEMU and the base image.
    ///
    /// # Errors
    /// What has not been built or is not in the cache.
    pub fn for_guest(programs: &[&str], sets: &[&str]) -> Result<Self> {
        let artifacts = Self::for_daemon(programs, sets)?;
        artifacts.agent()?;
        artifacts.qemu()?;
        artifacts.image()?;
        Ok(artifacts)
    }

    /// The artifacts of a build in the cargo target directory `target`.
    pub fn of_workspace(target: &Path, cache: &Cache) -> Self {
        Self { cache: cache.clone(), target: target.to_owned() }
    }

    /// The cache of packages and images.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// A program or library of this workspace, built in release mode.
    ///
    /// # Errors
    /// It has not been built.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let directory = variable(PROGRAMS_VARIABLE).unwrap_or_else(|| self.target.join("release"));
        existing(directory.join(name))
    }

    /// Our `libhsakmt.so.1`.
    ///
    /// # Errors
    /// It has not been linked.
    pub fn thunk(&self) -> Result<PathBuf> {
        existing(variable(THUNK_VARIABLE).unwrap_or_else(|| self.target.join("thunk/libhsakmt.so.1")))
    }

    /// Our `libdtif.so`, which lies beside `libhsakmt.so.1`.
    ///
    /// # Errors
    /// It has not been linked.
    pub fn dtif(&self) -> Result<PathBuf> {
        existing(self.thunk()?.with_file_name("libdtif.so"))
    }

    /// Our `libhsakmt_virtio`, shared or static, for callers with this layout of structs.
    ///
    /// # Errors
    /// It has not been linked.
    pub fn virtio(&self, layout: &str, file: &str) -> Result<PathBuf> {
        existing(self.thunk()?.with_file_name("virtio").join(layout).join(file))
    }

    /// The guest agent.
    ///
    /// # Errors
    /// It has not been built.
    pub fn agent(&self) -> Result<PathBuf> {
        let default = || self.target.join(AGENT_TARGET).join("release/kfd-agent");
        existing(variable(AGENT_VARIABLE).unwrap_or_else(default))
    }

    /// The root directory of an unpacked package set.
    ///
    /// # Errors
    /// It is not in the cache.
    pub fn packages(&self, set: &str) -> Result<PathBuf> {
        Ok(packages::offline(&self.cache, set)?.root())
    }

    /// QEMU.
    ///
    /// # Errors
    /// It is not in the cache.
    pub fn qemu(&self) -> Result<Qemu> {
        Ok(Qemu::new(self.packages("qemu")?))
    }

    /// The base image; it is built of the package sets in the cache if need be.
    ///
    /// # Errors
    /// A set that is not in the cache, or a failed build.
    pub fn image(&self) -> Result<BaseImage> {
        let [kernel, runtime] = BaseImage::sets()?;
        let kernel = packages::offline(&self.cache, &kernel)?;
        let runtime = packages::offline(&self.cache, &runtime)?;
        Ok(BaseImage::ensure(&self.cache, &kernel, &runtime)?)
    }

    /// A layer of the image; it is built of its package set in the cache if need be.
    ///
    /// # Errors
    /// A set that is not in the cache, or a failed build.
    pub fn layer(&self, name: &str) -> Result<Layer> {
        let set = packages::offline(&self.cache, &Layer::set(name)?)?;
        Ok(Layer::ensure(&self.cache, name, &set)?)
    }

    /// An overlay with the agent as the first process, and with our thunk if it has been linked.
    ///
    /// # Errors
    /// The agent has not been built.
    pub fn overlay(&self) -> Result<Archive> {
        let mut overlay = Archive::new();
        overlay.file(image::INIT, &self.agent()?)?;
        if let Ok(thunk) = self.thunk() {
            overlay.file(image::THUNK, &thunk)?;
        }
        Ok(overlay)
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    if Path::new(&path).exists() {
        Ok(path)
    } else {
        Err(anyhow!("{} has not been built: run the tests with `cargo xtask test`", path.display()))
    }
}
