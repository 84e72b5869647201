//! `libdtif.so`: what ROCr 7 loads under `HSA_ENABLE_DTIF=1` instead of the thunk inside it. It looks up some hundred functions by
//! name, all of which are this crate's, after `DtifCreate("HSA")` has answered an address.
//!
//! The functions take no sizes, so `DtifCreate` finds out which headers the runtime was compiled with, or refuses. What tells is
//! the runtime's own file: it has a thunk inside, whose reader of the topology names the files' fields. A field of the topology
//! came with its field of `HsaNodeProperties`, and since ROCm 7.0 new ones came at the end; so no more is written than there is.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use std::ffi::{c_char, c_void};
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::ptr::null;

use hsakmt_abi::caller::CallerLayout;

use super::caller::set_layout;
use crate::thunk::refusal::{Level, Outcome, Refusal, say};

/// How the file's name of a runtime begins.
const RUNTIME: &str = "libhsa-runtime64.so";

/// In runtimes that are newer than what is known here: a function that their loader looks up. With it came `WallClockKHz`, and
/// functions whose arguments have changed.
const NEWER: &[u8] = b"hsaKmtGetNodeWallclockFrequency";

/// Fields of the topology, the newest first, and the layout that came with each.
const FIELDS: [(&[u8], CallerLayout); 2] =
    [(b"ctl_stack_size\0", CallerLayout::N376), (b"capability2\0", CallerLayout::N368)];

/// What the runtime gets to see: that it is not null.
static PLATFORM: u8 = 0;

/// Gets the library ready for the runtime that is loaded in this process: an address, or null when it is not known which layouts of
/// structs that has.
///
/// # Safety
/// Any argument will do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn DtifCreate(name: *const c_char) -> *const c_void {
    let _ = name;
    match catch_unwind(|| runtime().and_then(|file| layout_of(&file))) {
        Ok(Ok(layout)) => {
            set_layout(layout);
            std::ptr::from_ref(&PLATFORM).cast()
        }
        Ok(Err(refusal)) => {
            say(Level::Error, || format!("DtifCreate: {refusal}"));
            null()
        }
        Err(_) => null(),
    }
}

/// Nothing to do: the library stays loaded.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn DtifDestroy() {}

/// The names that `libdtif.so` has besides.
pub const NAMES: &[&str] = &["DtifCreate", "DtifDestroy"];

/// The runtime's file.
fn runtime() -> Outcome<PathBuf> {
    let maps =
        fs::read_to_string("/proc/self/maps").map_err(|error| Refusal::error(format!("maps: {error}")))?;
    only_runtime(&maps)
}

/// The one file in a list of mappings (proc_pid_maps(5)) that is a runtime's.
fn only_runtime(maps: &str) -> Outcome<PathBuf> {
    let path = |line: &str| line.find('/').and_then(|at| line.get(at..)).map(PathBuf::from);
    let is_runtime = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(RUNTIME))
    };
    let mut found: Vec<PathBuf> = maps.lines().filter_map(path).filter(is_runtime).collect();
    found.dedup();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Refusal::error(format!("no {RUNTIME} is loaded"))),
        several => Err(Refusal::error(format!("{} files {RUNTIME} are loaded", several.len()))),
    }
}

/// The layout of the structs of a runtime.
fn layout_of(file: &Path) -> Outcome<CallerLayout> {
    let name = file.display();
    let bytes = fs::read(file).map_err(|error| Refusal::error(format!("{name}: {error}")))?;
    let has = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
    if has(NEWER) {
        return Err(Refusal::error(format!("{name} is newer than ROCm 7.2, its structs are not known")));
    }
    let known = FIELDS.into_iter().find(|(field, _)| has(field)).map(|(_, layout)| layout);
    known.ok_or_else(|| Refusal::error(format!("{name} is older than ROCm 7.0 or has no thunk inside")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]

    use super::*;

    const MAPS: &str = "7f0000000000-7f0000001000 r--p 00000000 08:01 11 /usr/lib/libc.so.6\n\
        7f0000100000-7f0000200000 r-xp 00000000 08:01 12 /opt/my rocm/libhsa-runtime64.so.1.18.70204\n\
        7f0000200000-7f0000300000 rw-p 00100000 08:01 12 /opt/my rocm/libhsa-runtime64.so.1.18.70204\n\
        7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]\n";

    #[test]
    fn the_runtime_is_found_among_the_mappings() {
        let found = only_runtime(MAPS).unwrap();
        assert_eq!(found, Path::new("/opt/my rocm/libhsa-runtime64.so.1.18.70204"));
        assert!(only_runtime("").unwrap_err().to_string().contains("no libhsa-runtime64.so is loaded"));
        let two = format!("{MAPS}7f00-7f01 r--p 0 08:01 13 /usr/lib/libhsa-runtime64.so.1\n");
        assert!(only_runtime(&two).unwrap_err().to_string().contains("2 files"));
    }

    #[test]
    fn a_runtime_is_known_by_the_fields_that_its_thunk_reads() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("libhsa-runtime64.so.1");
        let layout = |text: &str| {
            fs::write(&file, text).unwrap();
            layout_of(&file)
        };
        let fields_7_0 = "\0capability\0capability2\0family_id\0";
        assert_eq!(layout(fields_7_0), Ok(CallerLayout::N368));
        let fields_7_2 = "\0capability2\0cwsr_size\0ctl_stack_size\0";
        assert_eq!(layout(fields_7_2), Ok(CallerLayout::N376));
        let newer = format!("{fields_7_2}hsaKmtGetNodeWallclockFrequency\0");
        assert!(layout(&newer).unwrap_err().to_string().contains("newer than ROCm 7.2"));
        assert!(layout("\0capability\0").unwrap_err().to_string().contains("older than ROCm 7.0"));
    }
}
