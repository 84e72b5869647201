//! The package sets as data (`recipes/packages.toml`).

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::error::{Error, Result};

const TEXT: &str = include_str!("../recipes/packages.toml");

/// What a package set consists of; the fields are explained in `recipes/packages.toml`.
#[derive(Debug, Clone, Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Suites to resolve in.
    pub suites: Vec<String>,
    /// Package name pattern to the suite that wins for it.
    #[serde(default)]
    pub pin: BTreeMap<String, String>,
    /// Packages asked for.
    pub install: Vec<String>,
    /// Whether their dependencies come along.
    pub dependencies: bool,
    /// When not empty, only packages that match are unpacked.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Packages that match are not unpacked.
    #[serde(default)]
    pub drop: Vec<String>,
    /// Lowest version that serves, by package.
    #[serde(default)]
    pub at_least: BTreeMap<String, String>,
}

impl Recipe {
    /// Whether the set unpacks a package of this name.
    pub fn wants(&self, package: &str) -> bool {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, package));
        (self.keep.is_empty() || any(&self.keep)) && !any(&self.drop)
    }
}

/// All recipes by name.
///
/// # Errors
/// [`Error::Malformed`] when the data file is not valid.
pub fn all() -> Result<BTreeMap<String, Recipe>> {
    toml::from_str(TEXT).map_err(|error| Error::Malformed {
        path: "recipes/packages.toml".into(),
        problem: error.to_string(),
    })
}

/// The recipe of one set.
///
/// # Errors
/// [`Error::UnknownSet`] when there is no such set.
pub fn named(name: &str) -> Result<Recipe> {
    let recipes = all()?;
    recipes.get(name).cloned().ok_or_else(|| Error::UnknownSet {
        name: name.to_owned(),
        known: recipes.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
    })
}

/// Whether `name` is `pattern`, or begins with it up to a final `*`.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => pattern == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipes_parse_and_each_asks_for_something() {
        let recipes = all().unwrap();
        for set in ["qemu", "kernel", "rocm-trixie", "rocm-bookworm", "headers-trixie", "headers-bookworm"] {
            let recipe = recipes.get(set).unwrap_or_else(|| panic!("no set {set}"));
            assert!(!recipe.install.is_empty() && !recipe.suites.is_empty(), "{set}");
        }
        assert!(named("nope").unwrap_err().to_string().contains("the sets are"));
    }

    #[test]
    fn keep_and_drop_take_final_stars() {
        let kernel = named("kernel").unwrap();
        assert!(kernel.wants("linux-image-6.12.1-amd64") && !kernel.wants("udev"));
        let rocm = named("rocm-trixie").unwrap();
        assert!(rocm.wants("libhsakmt1") && !rocm.wants("python3.13-minimal"));
    }
}
