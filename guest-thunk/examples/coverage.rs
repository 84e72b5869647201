//! Prints docs/coverage.md.

fn main() {
    print!("{}", guest_thunk::export::coverage_page());
}
