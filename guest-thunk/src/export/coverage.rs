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
         does nothing. 5.2.3 is the library of Debian 12 (bookworm), 6.2.4 that of Debian 13 (trixie).\n",
        exports().count(),
        count(State::Done),
        count(State::NotImplemented),
        count(State::NotSupported),
    );
    page.push_str("| function | noun | 5.2.3 | 6.2.4 | state | note |\n|---|---|---|---|---|---|\n");
    for export in exports() {
        let releases = FUNCTIONS
            .iter()
            .find(|function| function.name == export.name)
            .map_or(Releases::empty(), |function| function.releases);
        let has = |release| if releases.contains(release) { "yes" } else { "" };
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            export.name,
            export.noun,
            has(Releases::ROCM_5_2_3),
            has(Releases::ROCM_6_2_4),
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
    fn the_table_is_the_api_of_both_releases() {
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
