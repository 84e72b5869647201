//! Programs of a package set in a guest, with all of the set's libraries that they need.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use virtio_kfd_images::Archive;

use crate::artifacts::Artifacts;
use crate::native::{runtime, text};
use crate::runtime::Runtime;

/// Directory of all sets in the guest, with one of the set's name for each.
pub const PLACE: &str = "opt/virtio-kfd";

/// Longest time in which a loader lists what it would load.
const LIMIT: Duration = Duration::from_secs(60);

/// Puts a program, or a library that programs load by themselves, and all libraries of `set` that it needs into an overlay, as
/// the set's own loader finds them here. Its name is `name` in the guest.
///
/// # Errors
/// The set is not in the cache, or the loader does not find a library.
pub fn install(
    artifacts: &Artifacts,
    set: &str,
    program: &Path,
    name: &str,
    overlay: &mut Archive,
) -> Result<()> {
    install_from(&runtime(artifacts, set)?, set, program, name, overlay)
}

/// The same for a program that has libraries of its own, which `runtime` knows.
///
/// # Errors
/// The loader does not find a library.
pub fn install_from(
    runtime: &Runtime,
    set: &str,
    program: &Path,
    name: &str,
    overlay: &mut Archive,
) -> Result<()> {
    let path = program.to_str().context("the path of a program")?;
    let mut command = runtime.command(path)?;
    // ld.so(8): list what would be loaded.
    command.env("LD_TRACE_LOADED_OBJECTS", "1");
    let list = text(command, LIMIT)?;
    let mut loader = false;
    for line in list.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, path) = match words.as_slice() {
            [name, "=>", path, _] => (*name, Path::new(*path)),
            [path, _] if path.starts_with('/') => (*path, Path::new(*path)),
            _ => continue,
        };
        let name = name.rsplit('/').next().unwrap_or(name);
        loader |= name.starts_with("ld-linux");
        let path = path.canonicalize().with_context(|| format!("{set}: {}", path.display()))?;
        overlay.file(&format!("{PLACE}/{set}/{name}"), &path)?;
    }
    loader.then_some(()).with_context(|| format!("no loader in {list}"))?;
    overlay.file(&format!("{PLACE}/{set}/{name}"), program)?;
    Ok(())
}

/// The shell command that runs an installed program with the set's own loader and libraries.
pub fn command(set: &str, name: &str) -> String {
    let place = format!("/{PLACE}/{set}");
    format!("{place}/ld-linux-x86-64.so.2 --library-path {place} {place}/{name}")
}
