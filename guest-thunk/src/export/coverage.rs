//! The coverage page (docs/coverage.md), generated from the table of exports.

use core::fmt::Write;

use hsakmt_abi::functions::FUNCTIONS;
use hsakmt_abi::release::Releases;

use super::{EXPORTS, Export, LIBDRM, LIBDRM_REFUSED, State};

/// The text of docs/coverage.md.
pub fn coverage_page() -> String {
    let mut page = String::from(
        "# What the guest library covers\n\nGenerated from the table of exports in `guest-thunk/src/export` by `cargo xtask \
         docs`; do not edit.\n\n",
    );
    let count = |state| exports().filter(|export| export.state == state).count();
    // Writing to a String cannot fail.
    let _ = writeln!(
        page,
        "{} functions: {} done, {} NOT_IMPLEMENTED, {} NOT_SUPPORTED. A function that is not done answers just that and \
         does nothing. 5.2.3 is the library of Debian 12 (bookworm), 6.2.4 that of Debian 13 (trixie), 2026 the list of exports \
         of rocm-systems in the middle of 2026 (109 names), DTIF what ROCr 7.0 to 7.2 looks up in `libdtif.so`.\n\n\
         All of them are in three libraries: `libhsakmt.so.1`, `libdtif.so` (with `DtifCreate` and `DtifDestroy`), and \
         `libhsakmt_virtio` with a `v` in front of each name, libdrm's included. Column v says since when \
         `hsakmt_virtio.h` has it: 2025-08 or 2026, or that ROCr's driver calls it later in 2026; the others are there all the \
         same.\n",
        exports().count(),
        count(State::Done),
        count(State::NotImplemented),
        count(State::NotSupported),
    );
    page.push_str("| function | noun | 5.2.3 | 6.2.4 | 2026 | DTIF | v | state | note |\n|---|---|---|---|---|---|---|---|---|\n");
    for export in exports() {
        let releases = FUNCTIONS
            .iter()
            .find(|function| function.name == export.name)
            .map_or(Releases::empty(), |function| function.releases);
        let has = |release| if releases.contains(release) { "yes" } else { "" };
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            export.name,
            export.noun,
            has(Releases::ROCM_5_2_3),
            has(Releases::ROCM_6_2_4),
            has(Releases::EXPORTS_2026),
            has(Releases::ROCR_7),
            virtio(export.name),
            match export.state {
                State::Done => "done",
                State::NotImplemented => "NOT_IMPLEMENTED",
                State::NotSupported => "NOT_SUPPORTED",
            },
            export.note,
        );
    }
    let _ = writeln!(
        page,
        "\nFor device handles that `hsaKmtGetAMDGPUDeviceHandle` gave out, and their buffers, it also has libdrm's {}; calls with \
         other handles and descriptors go on to the real library. The rest of libdrm_amdgpu that takes such a handle answers \
         `-EOPNOTSUPP` for it: {}.",
        list(LIBDRM.iter().copied().flatten()),
        list(LIBDRM_REFUSED),
    );
    page
}

/// Names that ROCr's driver for virtio may call (see tests/symbols.rs), without the `v`.
const VIRTIO: [(&str, &str); 3] = [
    ("2025-08", include_str!("../../golden/vhsakmt-2025-08.txt")),
    ("2026", include_str!("../../golden/vhsakmt-2026.txt")),
    ("later in 2026", include_str!("../../golden/vhsakmt-driver-2026.txt")),
];

/// Since when ROCr's driver for virtio may call a function.
fn virtio(name: &str) -> &'static str {
    let has = |names: &str| names.lines().any(|line| line.strip_prefix('v') == Some(name));
    VIRTIO.into_iter().find(|(_, names)| has(names)).map_or("", |(since, _)| since)
}

fn list<'a>(names: impl IntoIterator<Item = &'a &'a str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn exports() -> impl Iterator<Item = &'static Export> {
    EXPORTS.iter().copied().flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_table_is_the_api_of_all_releases() {
        let ours: BTreeSet<&str> = exports().map(|export| export.name).collect();
        let theirs: BTreeSet<&str> = FUNCTIONS.iter().map(|function| function.name).collect();
        assert_eq!(ours, theirs);
        assert_eq!(exports().count(), ours.len(), "no function twice");
    }

    #[test]
    fn whatever_is_not_done_says_why() {
        for export in exports().filter(|export| export.state != State::Done) {
            assert!(!export.note.is_empty(), "{}", export.name);
        }
    }
}
