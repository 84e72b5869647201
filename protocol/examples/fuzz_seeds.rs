//! Writes the fuzzers' first inputs, made from the call table: `fuzz_seeds DIR` fills DIR/{frame,request,answer,archive}
//! and DIR/dictionary.

use std::path::Path;
use std::{env, fs, io};

use virtio_kfd_protocol::frame::{
    ANSWER_MAGIC, AnswerFrameHeader, AnswerHeader, FrameHeader, REQUEST_MAGIC, RequestHeader,
};
use virtio_kfd_protocol::topology::{TopologyFile, pack};
use virtio_kfd_protocol::{CALLS, Capset, Features};
use zerocopy::IntoBytes;

fn main() -> io::Result<()> {
    let Some(directory) = env::args().nth(1) else {
        return Err(io::Error::other("usage: fuzz_seeds DIR"));
    };
    let directory = Path::new(&directory);
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let place = directory.join(target);
        fs::create_dir_all(&place)?;
        fs::write(place.join(name), bytes)
    };
    let mut dictionary = String::from("\"VKRQ\"\n\"VKAN\"\n\"VKFD\"\n");
    for call in CALLS {
        let tail = call.request_element * call.request_max.min(2);
        let len = (24 + call.request_size + tail).next_multiple_of(8);
        let answer = (call.answer_size + call.answer_element * call.answer_max.min(2)).next_multiple_of(8);
        let request = RequestHeader {
            opcode: call.opcode,
            len: len as u32,
            fixed_len: call.request_size as u32,
            tail_len: tail as u32,
            answer_len: answer as u32,
            flags: 0,
        };
        let header = FrameHeader {
            magic: REQUEST_MAGIC,
            version: 1,
            total_len: (48 + len) as u32,
            request_count: 1,
            answer_capacity: 65536,
            ..Default::default()
        };
        let mut frame = [header.as_bytes(), request.as_bytes()].concat();
        frame.resize(48 + len, 1);
        write("frame", call.name, &frame)?;

        let place = CALLS.iter().position(|row| row.opcode == call.opcode).unwrap_or(0) as u8;
        let mut seed = vec![place, call.request_size as u8];
        seed.resize(2 + call.request_size + tail, 1);
        write("request", call.name, &seed)?;

        let record = AnswerHeader {
            opcode: call.opcode,
            len: (24 + answer) as u32,
            fixed_len: call.answer_size as u32,
            tail_len: (call.answer_element * call.answer_max.min(2)) as u32,
            ..Default::default()
        };
        let header = AnswerFrameHeader {
            magic: ANSWER_MAGIC,
            version: 1,
            total_len: (56 + answer) as u32,
            answer_count: 1,
            ..Default::default()
        };
        let mut bytes = [header.as_bytes(), record.as_bytes()].concat();
        bytes.resize(56 + answer, 1);
        write("answer", call.name, &bytes)?;
        let opcode: String = call.opcode.to_le_bytes().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        dictionary.push_str(&format!("\"{opcode}\"\n"));
    }
    write("answer", "capset", Capset::announce(Features::all(), 1).as_bytes())?;
    let files = [TopologyFile { path: "nodes/1/properties".into(), content: b"simd_count 240\n".to_vec() }];
    write("archive", "properties", &pack(&files).map_err(io::Error::other)?)?;
    fs::write(directory.join("dictionary"), dictionary)
}
