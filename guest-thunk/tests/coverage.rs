//! docs/coverage.md is what the table of exports says.

use std::fs;
use std::path::Path;

#[test]
fn the_page_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/coverage.md");
    let page = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == guest_thunk::export::coverage_page(),
        "docs/coverage.md is not current: `cargo xtask docs` writes it"
    );
}
