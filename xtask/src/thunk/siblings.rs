//! The same thunk for callers that do not load a `libhsakmt.so.1`.
//!
//! | library | for | how its caller's layout of structs is known |
//! |---|---|---|
//! | `libdtif.so` | ROCr 7.0 to 7.2 under `HSA_ENABLE_DTIF=1` | `DtifCreate` looks at the runtime |
//! | `virtio/LAYOUT/libhsakmt_virtio.a`, `.so.1` | ROCr built with `BUILD_THUNK_VIRTIO`: the names with a `v` in front | it is linked for one |
//!
//! The functions are not written a second time: the objects are joined into one, in which `objcopy` renames the functions and
//! hides all else. So it can be linked into a library that has AMD's own thunk, libdrm or another static library of Rust in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use hsakmt_abi::caller::CallerLayout;
use virtio_kfd_images::tool;

use super::{LIBRARIES, beside, exported, shared, version_script};
use crate::workspace::Workspace;

/// Layouts of releases with a driver that calls the `vhsaKmt` functions: since 2025-08.
const VIRTIO: [CallerLayout; 5] = [
    CallerLayout::N368,
    CallerLayout::N376,
    CallerLayout::N392,
    CallerLayout::N396,
    CallerLayout::N396Persisting,
];

/// What `libdtif.so` exports besides the thunk's functions and libdrm's.
const DTIF: [&str; 2] = ["DtifCreate", "DtifDestroy"];

/// The function by which a library says what its caller's layout is.
const SET_LAYOUT: &str = "virtio_kfd_caller_layout";

/// Links all of them and returns their places.
pub fn link(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    tool::require(&["cc", "ld", "objcopy", "ar"])?;
    let archive = workspace.programs().join("libguest_thunk.a");
    let names = exported(&archive)?;
    let mut places = vec![dtif(workspace, &archive, &names)?];
    let directory = workspace.virtio();
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let own = beside(&directory)?;
    let joined = join(own.path(), &archive, &names)?;
    for layout in VIRTIO {
        places.extend(virtio(&directory, own.path(), &joined, &names, layout)?);
    }
    Ok(places)
}

fn dtif(workspace: &Workspace, archive: &Path, names: &[String]) -> Result<PathBuf> {
    let place = workspace.dtif();
    let directory = place.parent().context("the library's directory")?;
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let own = beside(directory)?;
    let all: Vec<String> = DTIF.into_iter().map(str::to_owned).chain(names.iter().cloned()).collect();
    let script = own.path().join("libdtif.ver");
    write(&script, &version_script("", &all))?;
    let fresh = own.path().join("libdtif.so");
    let mut command = shared("libdtif.so", &script);
    command.args(all.iter().map(|name| format!("-Wl,-u,{name}")));
    command.arg("-o").arg(&fresh).arg(archive).args(LIBRARIES);
    tool::output(&mut command)?;
    put(&fresh, &place)?;
    eprintln!("link-thunk: {} with {} symbols", place.display(), all.len());
    Ok(place)
}

/// Makes one object of the static library's, with nothing that only a debugger or the compiler reads.
fn join(own: &Path, archive: &Path, names: &[String]) -> Result<PathBuf> {
    let joined = own.join("joined.o");
    let mut command = Command::new("ld");
    // Groups would name each other across libraries.
    command.args(["-r", "--strip-debug", "--force-group-allocation", "-u", SET_LAYOUT]);
    command.args(names.iter().flat_map(|name| ["-u", name]));
    command.arg("-o").arg(&joined).arg(archive);
    tool::output(&mut command)?;
    // Bitcode of the standard library, which is one after the other now and no bitcode any more.
    let mut command = Command::new("objcopy");
    command.args(["--remove-section=.llvmbc", "--remove-section=.llvmcmd"]).arg(&joined);
    tool::output(&mut command)?;
    Ok(joined)
}

fn virtio(
    directory: &Path,
    own: &Path,
    joined: &Path,
    names: &[String],
    layout: CallerLayout,
) -> Result<[PathBuf; 2]> {
    let renamed: Vec<String> = names.iter().map(|name| format!("v{name}")).collect();
    let (map, keep, script) = (own.join("map"), own.join("keep"), own.join("libhsakmt_virtio.ver"));
    let pairs: String = names.iter().zip(&renamed).map(|(name, new)| format!("{name} {new}\n")).collect();
    write(&map, &pairs)?;
    write(&keep, &renamed.join("\n"))?;
    write(&script, &version_script("", &renamed))?;

    let (source, constructor) = (own.join("layout.c"), own.join("layout.o"));
    write(&source, &constructor_for(layout))?;
    tool::output(Command::new("cc").args(["-c", "-fPIC", "-O2"]).arg("-o").arg(&constructor).arg(&source))?;
    let (all, object) = (own.join("all.o"), own.join("hsakmt_virtio.o"));
    tool::output(Command::new("ld").arg("-r").arg("-o").arg(&all).arg(&constructor).arg(joined))?;
    let mut command = Command::new("objcopy");
    command.arg(format!("--redefine-syms={}", map.display()));
    command.arg(format!("--keep-global-symbols={}", keep.display()));
    tool::output(command.arg(&all).arg(&object))?;

    let place = directory.join(name(layout));
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    let fresh = own.join("libhsakmt_virtio.a");
    // ar would add to one that is there.
    let _ = fs::remove_file(&fresh);
    tool::output(Command::new("ar").arg("rcs").arg(&fresh).arg(&object))?;
    let archive = place.join("libhsakmt_virtio.a");
    put(&fresh, &archive)?;
    let fresh = own.join("libhsakmt_virtio.so.1");
    let mut command = shared("libhsakmt_virtio.so.1", &script);
    tool::output(command.arg("-o").arg(&fresh).arg(&object).args(LIBRARIES))?;
    let library = place.join("libhsakmt_virtio.so.1");
    put(&fresh, &library)?;
    eprintln!("link-thunk: {} with {} symbols", library.display(), renamed.len());
    Ok([archive, library])
}

/// The name of a layout's directory: bytes of a node, and of a cache where that has another size than it had for long.
pub fn name(layout: CallerLayout) -> String {
    let (node, cache) = (layout.node_size(), layout.cache_size());
    if cache == CallerLayout::N356.cache_size() { node.to_string() } else { format!("{node}-{cache}") }
}

/// C that says the layout when the library is loaded.
fn constructor_for(layout: CallerLayout) -> String {
    format!(
        "extern _Bool {SET_LAYOUT}(unsigned, unsigned);\n\
         __attribute__((constructor)) static void say(void) {{ {SET_LAYOUT}({}, {}); }}\n",
        layout.node_size(),
        layout.cache_size()
    )
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Moves a finished file to its place, which a running program may have mapped.
fn put(fresh: &Path, place: &Path) -> Result<()> {
    let size = fs::metadata(fresh).with_context(|| format!("{}", fresh.display()))?.len();
    ensure!(size > 0, "{} is empty", fresh.display());
    fs::rename(fresh, place).with_context(|| format!("move to {}", place.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layout_has_a_directory_of_its_own() {
        assert_eq!(VIRTIO.map(name), ["368", "376", "392", "396", "396-1060"]);
    }

    #[test]
    fn the_constructor_names_the_sizes() {
        let text = constructor_for(CallerLayout::N396Persisting);
        assert!(text.contains("virtio_kfd_caller_layout(396, 1060);"), "{text}");
    }
}
