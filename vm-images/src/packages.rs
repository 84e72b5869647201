//! Package sets in the cache: fetched once, unpacked side by side, named by their content.
//!
//! Layout below the cache directory:
//! - `packages/SET-NAME`: `root` has the unpacked files, `manifest.json` the packages with their versions;
//!   NAME is derived from the list of packages and versions;
//! - `sets/SET-RECIPE` names the entry that serves a set as long as its recipe stays the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt::{Apt, Package};
use crate::cache::{Cache, content_name};
use crate::error::{Context, Error, Result};
use crate::progress::Step;
use crate::recipe::{self, Recipe};
use crate::tool;

/// A complete package set in the cache.
#[derive(Debug, Clone)]
pub struct PackageSet {
    directory: PathBuf,
}

impl PackageSet {
    /// The directory into which all packages of the set were unpacked.
    pub fn root(&self) -> PathBuf {
        self.directory.join("root")
    }

    /// A name that changes with the packages or their versions.
    pub fn content_name(&self) -> String {
        self.directory.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The packages with their versions.
    ///
    /// # Errors
    /// A manifest that cannot be read.
    pub fn manifest(&self) -> Result<Vec<Package>> {
        let path = self.directory.join("manifest.json");
        let text = fs::read_to_string(&path).at("read", &path)?;
        serde_json::from_str(&text).map_err(|error| Error::Malformed { path, problem: error.to_string() })
    }
}

/// Fetches package sets into a cache.
#[derive(Debug)]
pub struct Fetcher {
    cache: Cache,
    apt: Option<Apt>,
    refresh: bool,
}

impl Fetcher {
    /// A fetcher for `cache`. With `refresh` the mirror is asked even for sets that the cache has.
    pub fn new(cache: &Cache, refresh: bool) -> Self {
        Self { cache: cache.clone(), apt: None, refresh }
    }

    /// A set from the cache; it is fetched first if it is not there.
    ///
    /// # Errors
    /// An unknown set, missing tools, or a failed download.
    pub fn ensure(&mut self, set: &str) -> Result<PackageSet> {
        let recipe = recipe::named(set)?;
        if !self.refresh
            && let Some(found) = cached(&self.cache, set, &recipe)?
        {
            return Ok(found);
        }
        let _lock =
            self.cache.lock(|| eprintln!("packages: waiting for another run that fills the cache"))?;
        if !self.refresh
            && let Some(found) = cached(&self.cache, set, &recipe)?
        {
            return Ok(found);
        }
        self.fetch(set, &recipe)
    }

    fn fetch(&mut self, set: &str, recipe: &Recipe) -> Result<PackageSet> {
        let step = Step::begin(format!("packages: {set}"));
        let apt = match &mut self.apt {
            Some(apt) => apt,
            none => none.insert(Apt::open(&self.cache)?),
        };
        let packages = apt.resolve(recipe, &step)?;
        let list = serde_json::to_vec_pretty(&packages)
            .map_err(|error| Error::Malformed { path: "manifest.json".into(), problem: error.to_string() })?;
        let name = format!("{set}-{}", content_name([list.as_slice()]));
        let place = self.cache.path(Path::new("packages").join(&name))?;
        if !place.exists() {
            let scratch = self.cache.scratch(set)?;
            let archives = scratch.path().join("archives");
            let root = scratch.path().join("root");
            for directory in [&archives, &root] {
                fs::create_dir(directory).at("create", directory)?;
            }
            let files = apt.download(recipe, &packages, &archives, &step)?;
            for (done, file) in files.iter().enumerate() {
                let label = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                step.percent(done as f64 * 100.0 / files.len() as f64, &format!("unpacking {label}"));
                tool::output(Command::new("dpkg-deb").arg("-x").arg(file).arg(&root))?;
            }
            fs::remove_dir_all(&archives).at("remove", &archives)?;
            let manifest = scratch.path().join("manifest.json");
            fs::write(&manifest, &list).at("write", &manifest)?;
            self.cache.publish(scratch, &place)?;
        }
        self.cache.write_whole(&pointer(&self.cache, set, recipe), name.as_bytes())?;
        step.done(&format!("{} packages", packages.len()));
        Ok(PackageSet { directory: place })
    }
}

/// A set that the cache has, without asking the network.
///
/// # Errors
/// [`Error::NotCached`] when it is not there, [`Error::UnknownSet`] when no recipe has the name.
pub fn offline(cache: &Cache, set: &str) -> Result<PackageSet> {
    let recipe = recipe::named(set)?;
    cached(cache, set, &recipe)?
        .ok_or_else(|| Error::NotCached { set: set.to_owned(), cache: cache.root().to_owned() })
}

fn cached(cache: &Cache, set: &str, recipe: &Recipe) -> Result<Option<PackageSet>> {
    let Ok(name) = fs::read_to_string(pointer(cache, set, recipe)) else { return Ok(None) };
    let directory = cache.path(Path::new("packages").join(name.trim()))?;
    Ok(directory.is_dir().then_some(PackageSet { directory }))
}

fn pointer(cache: &Cache, set: &str, recipe: &Recipe) -> PathBuf {
    let text = format!("{recipe:?}");
    cache.root().join("sets").join(format!("{set}-{}", content_name([text.as_bytes()])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_counts_only_when_pointer_and_directory_are_there() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let recipe = recipe::named("kernel").unwrap();
        assert!(offline(&cache, "kernel").unwrap_err().to_string().contains("cargo xtask packages"));
        cache.write_whole(&pointer(&cache, "kernel", &recipe), b"kernel-1234").unwrap();
        assert!(offline(&cache, "kernel").is_err());
        fs::create_dir_all(cache.root().join("packages/kernel-1234/root")).unwrap();
        fs::write(
            cache.root().join("packages/kernel-1234/manifest.json"),
            r#"[{"name":"busybox-static","version":"1"}]"#,
        )
        .unwrap();
        let set = offline(&cache, "kernel").unwrap();
        assert_eq!(set.manifest().unwrap().len(), 1);
        assert_eq!(set.content_name(), "kernel-1234");
        // With a complete set no apt is needed, whatever the machine is.
        assert_eq!(Fetcher::new(&cache, false).ensure("kernel").unwrap().root(), set.root());
    }
}
