//! The exported symbols against the lists in golden/, which were read from Debian's libraries: `libhsakmt-*.txt` are the
//! exports of AMD's library (bookworm 5.2.3, trixie 6.2.4), `libdrm-*.txt` the functions of libdrm and libdrm_amdgpu
//! that trixie's libhsa-runtime64 imports and calls with device handles of the thunk; `libdrm-besides.txt` those that it
//! looks up by name (`amdgpu_device_get_fd`), or whose counterpart it imports; `libdrm-2.4.124-with-handles.txt` all others
//! whose first argument is the handle of a device or a buffer, by trixie's amdgpu.h.
//!
//! For other callers, from rocm-systems: `libhsakmt-2026.txt` is libhsakmt.ver of 0dfa0cb3, its names for Windows counted in;
//! `dtif-rocr-7.txt` what thunk_loader.cpp of ROCr 7.2 looks up in libdtif.so; `vhsakmt-2025-08.txt` libhsakmt_virtio.ver of
//! 1b1610fc; `vhsakmt-2026.txt` the functions of hsakmt_virtio.h in the middle of 2026; `vhsakmt-driver-2026.txt` what
//! amd_kfd_virtio_driver.cpp of 0877507f, later in 2026, calls.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use guest_thunk::export::{EXPORTS, LIBDRM, LIBDRM_REFUSED, dtif};
use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM};
use object::read::archive::ArchiveFile;
use object::read::elf::{FileHeader, Sym};

fn golden(name: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

fn ours() -> Vec<&'static str> {
    let libdrm = LIBDRM.iter().copied().flatten().chain(LIBDRM_REFUSED).copied();
    EXPORTS.iter().copied().flatten().map(|export| export.name).chain(libdrm).collect()
}

#[test]
fn the_table_has_every_function_of_debians_libraries() {
    let ours = ours();
    for (list, count) in [
        ("libhsakmt-5.2.3.txt", 67),
        ("libhsakmt-6.2.4.txt", 88),
        ("libdrm-of-rocr-6.1.2.txt", 7),
        ("libdrm-besides.txt", 2),
        ("libdrm-2.4.124-with-handles.txt", 53),
        ("libhsakmt-2026.txt", 109),
    ] {
        let names = golden(list);
        assert_eq!(names.len(), count, "{list}");
        for name in names {
            assert!(ours.contains(&name.as_str()), "{name} of {list} is not exported");
        }
    }
}

/// Lists of names with a `v` in front, and how many there are.
const VIRTIO: [(&str, usize); 3] =
    [("vhsakmt-2025-08.txt", 40), ("vhsakmt-2026.txt", 80), ("vhsakmt-driver-2026.txt", 40)];

#[test]
fn the_table_has_what_other_callers_ask_for() {
    let mut ours = ours();
    ours.extend(dtif::NAMES);
    let names = golden("dtif-rocr-7.txt");
    assert_eq!(names.len(), 106);
    for name in names {
        assert!(ours.contains(&name.as_str()), "{name} of ROCr 7's loader");
    }
    for (list, count) in VIRTIO {
        let names = golden(list);
        assert_eq!(names.len(), count, "{list}");
        for name in names {
            let without = name.strip_prefix('v').unwrap();
            assert!(ours.contains(&without), "{name} of {list} is not there");
        }
    }
}

#[test]
fn the_table_has_nothing_else() {
    let lists = [
        "libhsakmt-5.2.3.txt",
        "libhsakmt-6.2.4.txt",
        "libdrm-of-rocr-6.1.2.txt",
        "libdrm-besides.txt",
        "libdrm-2.4.124-with-handles.txt",
        "libhsakmt-2026.txt",
        "dtif-rocr-7.txt",
    ];
    let driver = golden("vhsakmt-driver-2026.txt").into_iter().map(|name| name[1..].to_owned());
    let theirs: Vec<String> = lists.into_iter().flat_map(golden).chain(driver).collect();
    for name in ours() {
        assert!(theirs.iter().any(|other| other == name), "{name} is in no list");
    }
}

/// The functions that a shared library exports, with their versions.
fn dynamic(data: &[u8]) -> BTreeMap<String, Option<String>> {
    let elf = FileHeader64::<Endianness>::parse(data).unwrap();
    let endian = elf.endian().unwrap();
    let sections = elf.sections(endian, data).unwrap();
    let versions = sections.versions(endian, data).unwrap();
    let symbols = sections.symbols(endian, data, SHT_DYNSYM).unwrap();
    let mut found = BTreeMap::new();
    for (index, symbol) in symbols.enumerate().filter(|(_, symbol)| !symbol.is_undefined(endian)) {
        let name = String::from_utf8(symbol.name(endian, symbols.strings()).unwrap().to_vec()).unwrap();
        let version = versions.as_ref().and_then(|versions| {
            let version = versions.version(versions.version_index(endian, index).into()).unwrap()?;
            Some(String::from_utf8(version.name().to_vec()).unwrap())
        });
        found.insert(name, version);
    }
    found
}

/// The linked `libhsakmt.so.1`, beside which the other libraries are.
fn linked() -> Option<PathBuf> {
    let path = std::env::var_os("VIRTIO_KFD_THUNK").map(PathBuf::from);
    if path.is_none() {
        println!(
            "SKIP: VIRTIO_KFD_THUNK does not name a linked libhsakmt.so.1 (cargo xtask link-thunk makes one)"
        );
    }
    path
}

#[test]
fn libdtif_exports_what_the_loader_asks_for() {
    let Some(path) = linked() else { return };
    let found = dynamic(&fs::read(path.with_file_name("libdtif.so")).unwrap());
    for name in golden("dtif-rocr-7.txt") {
        assert_eq!(found.get(&name), Some(&None), "{name}");
    }
    for name in found.keys() {
        assert!(ours().contains(&name.as_str()) || dtif::NAMES.contains(&name.as_str()), "{name}");
    }
}

#[test]
fn libhsakmt_virtio_exports_the_same_with_a_v_and_nothing_else() {
    let Some(path) = linked() else { return };
    let expected: Vec<String> = ours().iter().map(|name| format!("v{name}")).collect();
    for layout in ["368", "376", "392", "396", "396-1060"] {
        let directory = path.with_file_name("virtio").join(layout);
        let found = dynamic(&fs::read(directory.join("libhsakmt_virtio.so.1")).unwrap());
        let archived = archived(&fs::read(directory.join("libhsakmt_virtio.a")).unwrap());
        for name in &expected {
            assert_eq!(found.get(name), Some(&None), "{name}");
            assert!(archived.contains(name), "{name} in the archive");
        }
        for name in found.keys().chain(&archived) {
            assert!(expected.contains(name), "{name} should be hidden");
        }
    }
}

/// The names that objects of a static library define for others.
fn archived(data: &[u8]) -> Vec<String> {
    let archive = ArchiveFile::parse(data).unwrap();
    let symbols = archive.symbols().unwrap().unwrap();
    symbols.map(|symbol| String::from_utf8(symbol.unwrap().name().to_vec()).unwrap()).collect()
}

#[test]
fn the_linked_library_exports_the_table_and_its_version() {
    let Some(path) = linked() else { return };
    let found = dynamic(&fs::read(path).unwrap());
    for name in ours() {
        assert_eq!(found.get(name), Some(&Some("HSAKMT_1".to_owned())), "{name}");
    }
    for name in found.keys().filter(|name| *name != "HSAKMT_1") {
        assert!(ours().contains(&name.as_str()), "{name} should be hidden");
    }
}
