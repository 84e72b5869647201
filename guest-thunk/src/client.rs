//! Calls: frames out, answers in.
//!
//! ```text
//! Client::connect()                  handshake done, answer memory mapped
//! client.call::<GetClockCounters>(&request, &[], 0)
//! client.batch()                     several requests in one frame: push::<C>() ... run()
//! client.wait_call::<WaitEvents>()   on a ring of its own
//! ```
