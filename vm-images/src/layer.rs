//! Layers: archives with files of another package set, which go between the base image and the overlay of guests that
//! need them.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::cache::{Cache, content_name};
use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::image::{self, Recipe};
use crate::packages::PackageSet;
use crate::progress::Step;

/// What a layer consists of.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LayerRecipe {
    /// The package set.
    set: String,
    /// Its files, as patterns like those of the base.
    include: Vec<String>,
}

/// A complete layer in the cache.
#[derive(Debug, Clone)]
pub struct Layer {
    archive: PathBuf,
}

impl Layer {
    /// The package set that the layer `name` is built of.
    ///
    /// # Errors
    /// No recipe has the name.
    pub fn set(name: &str) -> Result<String> {
        named(&image::recipe()?, name).map(|recipe| recipe.set.clone())
    }

    /// The layer from the cache; it is built of `set` first if it is not there.
    ///
    /// # Errors
    /// No recipe has the name, a file that the recipe names is not in the set, or a failed build step.
    pub fn ensure(cache: &Cache, name: &str, set: &PackageSet) -> Result<Self> {
        let recipe = image::recipe()?;
        let recipe = named(&recipe, name)?;
        let set_name = set.content_name();
        let parts = recipe.include.iter().map(String::as_bytes).chain([set_name.as_bytes()]);
        let archive = cache.path(format!("images/{name}-{}.cpio", content_name(parts)))?;
        if !archive.exists() {
            let _lock = cache.lock(|| eprintln!("image: waiting for another run that fills the cache"))?;
            if !archive.exists() {
                build(cache, name, recipe, &set.root(), &archive)?;
            }
        }
        Ok(Self { archive })
    }

    /// The layer's archive.
    pub fn archive(&self) -> &Path {
        &self.archive
    }
}

fn named<'a>(recipe: &'a Recipe, name: &str) -> Result<&'a LayerRecipe> {
    recipe.layer.get(name).ok_or_else(|| Error::Malformed {
        path: "recipes/image.toml".into(),
        problem: format!(
            "no layer {name}; the layers are {}",
            recipe.layer.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        ),
    })
}

fn build(cache: &Cache, name: &str, recipe: &LayerRecipe, root: &Path, place: &Path) -> Result<()> {
    let step = Step::begin(format!("image: layer {name}"));
    let mut content = Archive::new();
    let mut found = vec![false; recipe.include.len()];
    image::walk(root, |relative, path| {
        let mut wanted = false;
        for (pattern, found) in recipe.include.iter().zip(&mut found) {
            if image::matches(pattern, relative) {
                (wanted, *found) = (true, true);
            }
        }
        if wanted { image::add(&mut content, relative, path) } else { Ok(()) }
    })?;
    if let Some((pattern, _)) = recipe.include.iter().zip(&found).find(|(_, found)| !**found) {
        return Err(Error::Malformed {
            path: root.to_owned(),
            problem: format!("nothing for {pattern}, which the layer {name} needs"),
        });
    }
    let scratch = cache.scratch("layer")?;
    let built = scratch.path().join("layer.cpio");
    image::write_archive(&content, &built)?;
    fs::rename(&built, place).at("move a finished layer to", place)?;
    let size = fs::metadata(place).at("read", place)?.len();
    step.done(&format!("{} MiB", size >> 20));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_are_of_sets_that_there_are() {
        let recipe = image::recipe().unwrap();
        assert!(recipe.layer.contains_key("hip"));
        for (name, layer) in &recipe.layer {
            crate::recipe::named(&layer.set).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        assert!(Layer::set("nope").unwrap_err().to_string().contains("the layers are hip"));
    }

    #[test]
    fn a_layer_takes_what_its_patterns_name_and_misses_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache")).unwrap();
        let root = directory.path().join("root");
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        fs::write(root.join("usr/lib/liba.so.1.2"), "library").unwrap();
        fs::write(root.join("usr/lib/liba.a"), "not this").unwrap();
        std::os::unix::fs::symlink("liba.so.1.2", root.join("usr/lib/liba.so.1")).unwrap();
        let recipe = |include: &[&str]| LayerRecipe {
            set: "x".to_owned(),
            include: include.iter().map(|pattern| (*pattern).to_owned()).collect(),
        };
        let place = directory.path().join("layer.cpio");
        build(&cache, "x", &recipe(&["usr/lib/liba.so.*"]), &root, &place).unwrap();
        let bytes = fs::read(&place).unwrap();
        let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(has("usr/lib/liba.so.1\0") && has("usr/lib/liba.so.1.2\0") && !has("liba.a\0"));
        let error = build(&cache, "x", &recipe(&["usr/lib/libb.so.*"]), &root, &place).unwrap_err();
        assert!(error.to_string().contains("nothing for usr/lib/libb.so.*"), "{error}");
    }
}
