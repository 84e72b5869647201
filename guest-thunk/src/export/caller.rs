//! Which headers this library's caller was compiled with: some structs have other sizes in other releases.
//!
//! `libhsakmt.so.1` is for runtimes with a shared thunk, which are all of the oldest layout. What is linked for other callers says
//! so once, before any call: [`super::dtif`] when a runtime asks for it, `libhsakmt_virtio` when it is loaded.
#![allow(unsafe_code, reason = "an exported C function")]

use std::sync::atomic::{AtomicU8, Ordering};

use hsakmt_abi::caller::CallerLayout;

/// The place of the layout in [`CallerLayout::ALL`].
static LAYOUT: AtomicU8 = AtomicU8::new(0);

/// The caller's layout: the oldest and smallest, unless it was set.
pub fn layout() -> CallerLayout {
    let index = usize::from(LAYOUT.load(Ordering::Relaxed));
    CallerLayout::ALL.get(index).copied().unwrap_or(CallerLayout::N356)
}

/// Says what the caller's layout is.
pub fn set_layout(layout: CallerLayout) {
    LAYOUT.store(layout as u8, Ordering::Relaxed);
}

/// What a library that is linked for one layout calls when it is loaded: bytes of `HsaNodeProperties` and of
/// `HsaCacheProperties`. False, and no change, for a layout that there is not.
#[unsafe(no_mangle)]
pub extern "C" fn virtio_kfd_caller_layout(node: u32, cache: u32) -> bool {
    let size = |bytes| usize::try_from(bytes).unwrap_or(0);
    let found = CallerLayout::of_sizes(size(node), size(cache));
    found.map(set_layout).is_some()
}
