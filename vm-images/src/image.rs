//! Guest images: a cached base (kernel, busybox, runtime) and a small overlay with what changes at every build.
//!
//! Both are cpio archives; the kernel unpacks them one after the other, so that a file of the overlay takes the place of
//! the base's. They are not compressed: a guest on an emulated CPU would spend longer on decompression than on reading.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::cache::{Cache, content_name};
use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::kmod::ModuleTree;
use crate::layer::{Layer, LayerRecipe};
use crate::packages::PackageSet;
use crate::progress::Step;
use crate::tool;

const RECIPE: &str = include_str!("../recipes/image.toml");

/// Part of the base's name; to be changed when the builder puts something else into it.
const BUILDER_VERSION: &[u8] = b"1";

/// Place of the first process in an image.
pub const INIT: &str = "init";

/// Where the runtime looks for the thunk library.
pub const THUNK: &str = "usr/lib/x86_64-linux-gnu/libhsakmt.so.1";

/// Where Debian's own thunk library was moved to, for comparisons.
pub const DEBIAN_THUNK_DIRECTORY: &str = "/usr/lib/debian-libhsakmt";

/// Accounts of the guest: root, and an ordinary user for what must not need root.
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n\
                      nobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n";
const GROUP: &str = "root:x:0:\nvideo:x:44:\nrender:x:105:\nuser:x:1000:\nnogroup:x:65534:\n";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    kernel: String,
    runtime: String,
    modules: Vec<String>,
    strip_sections: Vec<String>,
    include: Vec<String>,
    exclude: Vec<String>,
    exclude_suffixes: Vec<String>,
    r#move: std::collections::BTreeMap<String, String>,
    pub(crate) layer: std::collections::BTreeMap<String, LayerRecipe>,
}

impl Recipe {
    /// Where a file of the runtime goes in the image, if it goes there at all.
    fn place(&self, file: &str) -> Option<String> {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, file));
        if !any(&self.include)
            || any(&self.exclude)
            || self.exclude_suffixes.iter().any(|end| file.ends_with(end))
        {
            return None;
        }
        let moved = self
            .r#move
            .iter()
            .find_map(|(from, to)| file.strip_prefix(from).map(|rest| format!("{to}{rest}")));
        Some(moved.unwrap_or_else(|| file.to_owned()))
    }
}

/// Whether a file is meant by a pattern: it is the same, or begins like it up to a final `*`.
pub(crate) fn matches(pattern: &str, file: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => file.starts_with(start),
        None => file == pattern,
    }
}

/// A complete base image in the cache.
#[derive(Debug, Clone)]
pub struct BaseImage {
    kernel: PathBuf,
    archive: PathBuf,
}

impl BaseImage {
    /// The package sets that the base is built of: the kernel's and the runtime's.
    ///
    /// # Errors
    /// A recipe that does not parse.
    pub fn sets() -> Result<[String; 2]> {
        recipe().map(|recipe| [recipe.kernel, recipe.runtime])
    }

    /// The base image from the cache; it is built first if it is not there.
    ///
    /// # Errors
    /// A package set without the expected files, or a failed build step.
    pub fn ensure(cache: &Cache, kernel: &PackageSet, runtime: &PackageSet) -> Result<Self> {
        let recipe = recipe()?;
        let (kernel_name, runtime_name) = (kernel.content_name(), runtime.content_name());
        let name = content_name([
            RECIPE.as_bytes(),
            BUILDER_VERSION,
            kernel_name.as_bytes(),
            runtime_name.as_bytes(),
        ]);
        let archive = cache.path(format!("images/base-{name}.cpio"))?;
        let vmlinuz = vmlinuz(&kernel.root())?;
        let done = Self { kernel: vmlinuz, archive };
        if done.archive.exists() {
            return Ok(done);
        }
        let _lock = cache.lock(|| eprintln!("image: waiting for another run that fills the cache"))?;
        if done.archive.exists() {
            return Ok(done);
        }
        let step = Step::begin("image: base");
        let scratch = cache.scratch("image")?;
        let tree = ModuleTree::open(&kernel.root())?;
        let mut content = Archive::new();
        system_files(&mut content);
        runtime_files(&mut content, &recipe, &runtime.root())?;
        busybox(&mut content, &kernel.root())?;
        let mut list = String::new();
        let modules = tree.closure(&recipe.modules, &recipe.strip_sections, scratch.path(), |name| {
            step.doing(&format!("module {name}"));
        })?;
        for module in modules {
            let file = format!("{}.ko", module.name);
            list.push_str(&format!("{} {file} {}\n", module.name, module.needs.join(" ")));
            content.bytes(&format!("usr/lib/virtio-kfd/{file}"), 0o644, module.bytes);
        }
        content.bytes("usr/lib/virtio-kfd/modules.list", 0o644, list);
        let built = scratch.path().join("base.cpio");
        write_archive(&content, &built)?;
        fs::rename(&built, &done.archive).at("move a finished image to", &done.archive)?;
        let size = fs::metadata(&done.archive).at("read", &done.archive)?.len();
        step.done(&format!("kernel {}, {} MiB", tree.release(), size >> 20));
        Ok(done)
    }

    /// The kernel to boot.
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// The base's archive, without an overlay (it has no first process).
    pub fn archive(&self) -> &Path {
        &self.archive
    }

    /// Writes base and overlay to `place`, as one initramfs.
    ///
    /// # Errors
    /// A failed file operation.
    pub fn with_overlay(&self, overlay: &Archive, place: &Path) -> Result<()> {
        self.with_layers(&[], overlay, place)
    }

    /// Writes base, layers and overlay to `place`, as one initramfs; later files take the place of earlier ones.
    ///
    /// # Errors
    /// A failed file operation.
    pub fn with_layers(&self, layers: &[Layer], overlay: &Archive, place: &Path) -> Result<()> {
        let mut file = File::create(place).at("create", place)?;
        for archive in [self.archive()].into_iter().chain(layers.iter().map(Layer::archive)) {
            let mut part = File::open(archive).at("open", archive)?;
            // io::copy lets the kernel copy or share the blocks.
            io::copy(&mut part, &mut file).at("write", place)?;
        }
        let mut writer = BufWriter::new(file);
        overlay.write(&mut writer, place)?;
        writer.flush().at("write", place)
    }
}

pub(crate) fn recipe() -> Result<Recipe> {
    toml::from_str(RECIPE)
        .map_err(|error| Error::Malformed { path: "recipes/image.toml".into(), problem: error.to_string() })
}

fn vmlinuz(root: &Path) -> Result<PathBuf> {
    let boot = root.join("boot");
    fs::read_dir(&boot)
        .at("read", &boot)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
        .ok_or_else(|| Error::Malformed { path: boot, problem: "no vmlinuz-RELEASE".to_owned() })
}

fn system_files(content: &mut Archive) {
    content.merge_usr();
    for place in ["dev", "proc", "sys", "run", "tmp", "root", "var/tmp", "etc"] {
        content.directory(place);
    }
    content.character("dev/console", 5, 1);
    content.bytes("etc/passwd", 0o644, PASSWD).bytes("etc/group", 0o644, GROUP);
}

fn runtime_files(content: &mut Archive, recipe: &Recipe, root: &Path) -> Result<()> {
    walk(root, |relative, path| match recipe.place(relative) {
        Some(place) => add(content, &place, path),
        None => Ok(()),
    })
}

/// Calls `each` for every file and link below `root`, with its path relative to `root` and its whole path.
pub(crate) fn walk(root: &Path, mut each: impl FnMut(&str, &Path) -> Result<()>) -> Result<()> {
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).at("read", &directory)?.flatten() {
            let path = entry.path();
            if entry.file_type().at("read", &path)?.is_dir() {
                pending.push(path);
                continue;
            }
            each(&path.strip_prefix(root).unwrap_or(&path).to_string_lossy(), &path)?;
        }
    }
    Ok(())
}

/// Puts a file or a link of a package set at `place`.
pub(crate) fn add(content: &mut Archive, place: &str, path: &Path) -> Result<()> {
    if path.is_symlink() {
        let target = fs::read_link(path).at("read", path)?;
        content.link(place, target.to_string_lossy());
    } else {
        content.file(place, path)?;
    }
    Ok(())
}

/// Busybox and a link for each of its commands that nothing else brings.
fn busybox(content: &mut Archive, root: &Path) -> Result<()> {
    let program = ["usr/bin/busybox", "bin/busybox"]
        .map(|place| root.join(place))
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| Error::Malformed { path: root.to_owned(), problem: "no busybox".to_owned() })?;
    content.file("usr/bin/busybox", &program)?;
    for name in tool::output(Command::new(&program).arg("--list"))?.lines() {
        let place = format!("usr/bin/{name}");
        if !content.contains(&place) {
            content.link(&place, "busybox");
        }
    }
    Ok(())
}

pub(crate) fn write_archive(content: &Archive, place: &Path) -> Result<()> {
    let mut writer = BufWriter::new(File::create(place).at("create", place)?);
    content.write(&mut writer, place)?;
    writer.flush().at("write", place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipe_keeps_libraries_and_moves_the_thunk() {
        let recipe = recipe().unwrap();
        let place = |file: &str| recipe.place(file);
        let library = "usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1";
        assert_eq!(place(library).as_deref(), Some(library));
        assert_eq!(
            place("usr/lib/x86_64-linux-gnu/libhsakmt.so.1").as_deref(),
            Some("usr/lib/debian-libhsakmt/libhsakmt.so.1")
        );
        for unwanted in
            ["usr/share/doc/x", "usr/lib/x86_64-linux-gnu/libc.a", "usr/lib/x86_64-linux-gnu/libcrypto.so.3"]
        {
            assert_eq!(place(unwanted), None, "{unwanted}");
        }
    }
}
