//! The exported symbols against the lists in golden/, which were read from Debian's libraries: `libhsakmt-*.txt` are the
//! exports of AMD's library (bookworm 5.2.3, trixie 6.2.4), `libdrm-*.txt` the functions of libdrm and libdrm_amdgpu
//! that trixie's libhsa-runtime64 imports and calls with device handles of the thunk; `libdrm-besides.txt` those that it
//! looks up by name (`amdgpu_device_get_fd`), or whose counterpart it imports; `libdrm-2.4.124-with-handles.txt` all others
//! whose first argument is the handle of a device or a buffer, by trixie's amdgpu.h.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use guest_thunk::export::{EXPORTS, LIBDRM, LIBDRM_REFUSED};
use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM};
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
    ] {
        let names = golden(list);
        assert_eq!(names.len(), count, "{list}");
        for name in names {
            assert!(ours.contains(&name.as_str()), "{name} of {list} is not exported");
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
    ];
    let theirs: Vec<String> = lists.into_iter().flat_map(golden).collect();
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

#[test]
fn the_linked_library_exports_the_table_and_its_version() {
    let Some(path) = std::env::var_os("VIRTIO_KFD_THUNK") else {
        println!(
            "SKIP: VIRTIO_KFD_THUNK does not name a linked libhsakmt.so.1 (cargo xtask link-thunk makes one)"
        );
        return;
    };
    let found = dynamic(&fs::read(path).unwrap());
    for name in ours() {
        assert_eq!(found.get(name), Some(&Some("HSAKMT_1".to_owned())), "{name}");
    }
    for name in found.keys().filter(|name| *name != "HSAKMT_1") {
        assert!(ours().contains(&name.as_str()), "{name} should be hidden");
    }
}
