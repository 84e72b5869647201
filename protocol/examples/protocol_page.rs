//! Prints docs/protocol.md.

fn main() {
    print!("{}", virtio_kfd_protocol::page::protocol_page());
}
