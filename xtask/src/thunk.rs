//! `cargo xtask link-thunk`: make `libhsakmt.so.1` of the guest-thunk static library, and its siblings for other callers
//! ([`siblings`]).
//!
//! A cdylib does not do: since rustc 1.95 its link ignores a version script, and the runtimes look for symbols of the
//! version HSAKMT_1. So the C compiler links the static library, with a version script that is made of the symbols it
//! finds in there.

pub mod siblings;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use hsakmt_abi::functions::FUNCTIONS;
use hsakmt_abi::release::SYMBOL_VERSION;
use object::read::archive::ArchiveFile;
use object::{Object, ObjectSymbol};
use virtio_kfd_images::{Cache, packages, tool};

use crate::workspace::Workspace;

/// How the names begin that the library exports: the thunk's own, and those of libdrm that a runtime calls with handles
/// that are ours.
const PREFIXES: &[&str] = &["hsaKmt", "amdgpu_", "drmCommand"];

/// Package sets whose libhsakmt ours must be able to replace.
pub const REPLACED: &[&str] = &["rocm-trixie", "rocm-bookworm"];

/// Links the library and returns its place.
pub fn link(workspace: &Workspace) -> Result<PathBuf> {
    tool::require(&["cc"])?;
    let archive = workspace.programs().join("libguest_thunk.a");
    let names = exported(&archive)?;
    let place = workspace.thunk();
    let directory = place.parent().context("the library's directory")?;
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    // Linked beside its place and renamed: a running program may have the old one mapped, and another link may run.
    let own = beside(directory)?;
    let script = own.path().join("libhsakmt.ver");
    fs::write(&script, version_script(SYMBOL_VERSION, &names))
        .with_context(|| format!("write {}", script.display()))?;
    let fresh = own.path().join("libhsakmt.so.1");
    let mut command = shared("libhsakmt.so.1", &script);
    command.args(names.iter().map(|name| format!("-Wl,-u,{name}")));
    command.arg("-o").arg(&fresh).arg(&archive).args(LIBRARIES);
    tool::output(&mut command)?;
    fs::rename(&fresh, &place).with_context(|| format!("move to {}", place.display()))?;
    eprintln!("link-thunk: {} with {} symbols", place.display(), names.len());
    Ok(place)
}

/// What the static library needs.
const LIBRARIES: &[&str] =
    &["-Wl,--as-needed", "-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// The C compiler, about to link a shared library with these exports.
fn shared(soname: &str, script: &Path) -> Command {
    let mut command = Command::new("cc");
    command.args(["-shared", "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,--gc-sections"]);
    // Threads of it run, and signal handlers of it are installed, when a program closes it.
    command.arg("-Wl,-z,nodelete");
    command.arg(format!("-Wl,-soname,{soname}"));
    command.arg(format!("-Wl,--version-script={}", script.display()));
    command
}

/// A directory that no other link uses, on the same file system as the library's. It goes with what it returns.
fn beside(directory: &Path) -> Result<tempfile::TempDir> {
    let made = tempfile::Builder::new().prefix("link-").tempdir_in(directory);
    made.with_context(|| format!("a directory in {}", directory.display()))
}

/// Functions that a replaced library exports and ours does not, by package set. The sets must be in the cache.
pub fn missing_exports(workspace: &Workspace, cache: &Cache) -> Result<Vec<(String, Vec<String>)>> {
    let ours = dynamic(&workspace.thunk())?;
    let mut missing = Vec::new();
    for set in REPLACED {
        let found = packages::offline(cache, set)?;
        let theirs = dynamic(&found.root().join("usr/lib/x86_64-linux-gnu/libhsakmt.so.1"))?;
        missing.push(((*set).to_owned(), theirs.difference(&ours).cloned().collect()));
    }
    Ok(missing)
}

/// The names that the library exports, sorted: the thunk's functions, all of which must be there, and what the static
/// library has of libdrm's.
fn exported(archive: &Path) -> Result<Vec<String>> {
    let names = defined(archive)?;
    let missing: Vec<&str> =
        FUNCTIONS.iter().map(|function| function.name).filter(|name| !names.contains(*name)).collect();
    if !missing.is_empty() {
        bail!("{}: {} functions are not defined: {}", archive.display(), missing.len(), missing.join(", "));
    }
    Ok(names.into_iter().collect())
}

/// The names in a static library that begin as an exported name may, sorted.
fn defined(archive: &Path) -> Result<BTreeSet<String>> {
    let data = fs::read(archive).with_context(|| format!("read {}", archive.display()))?;
    let file = ArchiveFile::parse(data.as_slice()).with_context(|| format!("{}", archive.display()))?;
    let mut names = BTreeSet::new();
    for member in file.members() {
        let member = member.with_context(|| format!("{}", archive.display()))?;
        let bytes = member.data(data.as_slice()).with_context(|| format!("{}", archive.display()))?;
        // Members that are no objects (rustc's metadata) have no symbols.
        let Ok(object) = object::File::parse(bytes) else { continue };
        for symbol in object.symbols().filter(|symbol| symbol.is_global() && symbol.is_definition()) {
            if let Ok(name) = symbol.name()
                && PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            {
                names.insert(name.to_owned());
            }
        }
    }
    Ok(names)
}

/// Exports these names with a version, or without one if that is empty, and nothing else.
fn version_script(version: &str, names: &[String]) -> String {
    let mut text = format!("{version} {{\nglobal:\n");
    for name in names {
        text.push_str(&format!("    {name};\n"));
    }
    text.push_str("local:\n    *;\n};\n");
    text
}

/// The functions that a shared library exports.
fn dynamic(library: &Path) -> Result<BTreeSet<String>> {
    let data = fs::read(library).with_context(|| format!("read {}", library.display()))?;
    let file = object::File::parse(data.as_slice()).with_context(|| format!("{}", library.display()))?;
    let names = file
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition() && symbol.kind() == object::SymbolKind::Text)
        .filter_map(|symbol| symbol.name().ok().map(str::to_owned))
        .collect();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_script_hides_all_else() {
        let text = version_script(SYMBOL_VERSION, &["hsaKmtCloseKFD".to_owned(), "hsaKmtOpenKFD".to_owned()]);
        assert_eq!(
            text,
            "HSAKMT_1 {\nglobal:\n    hsaKmtCloseKFD;\n    hsaKmtOpenKFD;\nlocal:\n    *;\n};\n"
        );
    }

    #[test]
    fn two_links_at_a_time_have_places_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let (one, two) = (beside(directory.path()).unwrap(), beside(directory.path()).unwrap());
        for own in [&one, &two] {
            fs::write(own.path().join("libhsakmt.so.1"), format!("{}", own.path().display())).unwrap();
        }
        for own in [one, two] {
            let fresh = own.path().join("libhsakmt.so.1");
            assert_eq!(fs::read_to_string(&fresh).unwrap(), format!("{}", own.path().display()));
            fs::rename(&fresh, directory.path().join("libhsakmt.so.1")).unwrap();
        }
        let left: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["libhsakmt.so.1"], "and leave nothing");
    }

    #[test]
    fn symbols_of_an_archive_are_found_by_prefix() {
        if tool::require(&["cc", "ar"]).is_err() {
            println!("SKIP: no C compiler");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| directory.path().join(name);
        fs::write(
            place("a.c"),
            "int hsaKmtOpenKFD(void){return 0;} int other(void){return 1;} static int hsaKmtNo;",
        )
        .unwrap();
        tool::output(Command::new("cc").arg("-c").arg(place("a.c")).arg("-o").arg(place("a.o"))).unwrap();
        tool::output(Command::new("ar").arg("rcs").arg(place("l.a")).arg(place("a.o"))).unwrap();
        assert_eq!(defined(&place("l.a")).unwrap(), ["hsaKmtOpenKFD".to_owned()].into());
        let error = exported(&place("l.a")).unwrap_err().to_string();
        assert!(error.contains("functions are not defined: hsaKmtAcquireSystemProperties, "), "{error}");
        assert!(!error.contains("hsaKmtOpenKFD"), "{error}");
    }
}
