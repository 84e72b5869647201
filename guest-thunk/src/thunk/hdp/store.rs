//! Which store an instruction makes.

use iced_x86::{Code, Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// Bytes of the longest instruction.
pub const LONGEST: usize = 15;

/// A store to memory, which changes nothing else but one register at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// Where.
    pub address: u64,
    /// Bytes that are stored.
    pub size: u64,
    /// The instruction behind it.
    pub next: u64,
    /// The general register of 64 bits that gets what was in memory before (`xchg`), and its contents afterwards: there was 0.
    pub loads: Option<(Register, u64)>,
}

/// What is at an instruction pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A store.
    Store(Store),
    /// The instruction is longer than the bytes that were given.
    Longer,
    /// Something else, or a store whose address is not known.
    Other,
}

/// Looks at the instruction that the bytes at address `pointer` begin with. `value` gives the contents of the general
/// registers of 64 bits. Allocates nothing once it was called before.
pub fn look(bytes: &[u8], pointer: u64, value: impl Fn(Register) -> Option<u64>) -> Found {
    let Ok(mut decoder) = Decoder::try_with_ip(64, bytes, pointer, DecoderOptions::NONE) else {
        return Found::Other;
    };
    let mut instruction = Instruction::default();
    decoder.decode_out(&mut instruction);
    if decoder.last_error() == DecoderError::NoMoreBytes {
        return Found::Longer;
    }
    if instruction.code() == Code::INVALID || instruction.op0_kind() != OpKind::Memory {
        return Found::Other;
    }
    let loads = match instruction.mnemonic() {
        // What compilers make of a sequentially consistent atomic store.
        Mnemonic::Xchg => {
            let name = instruction.op1_register();
            let full = name.full_register();
            let Some(before) = value(full) else { return Found::Other };
            Some((full, without(name, before)))
        }
        other if stores_only(other) => None,
        _ => return Found::Other,
    };
    let contents = |register: Register, _, _| match register {
        // Their base is 0 in 64-bit mode.
        Register::ES | Register::CS | Register::SS | Register::DS => Some(0),
        // Thread-local: nobody has a device's page there.
        Register::FS | Register::GS => None,
        general => part(general, value(general.full_register())?),
    };
    match instruction.virtual_address(0, 0, contents) {
        Some(address) => {
            let size = instruction.memory_size().size() as u64;
            Found::Store(Store { address, size, next: instruction.next_ip(), loads })
        }
        None => Found::Other,
    }
}

/// What a register that addresses memory has of its full register: with an address-size prefix, half of it.
fn part(register: Register, full: u64) -> Option<u64> {
    match register.size() {
        8 => Some(full),
        4 => Some(full & u64::from(u32::MAX)),
        _ => None,
    }
}

/// A full register whose part of this name has become 0: with 32 bits, the rest as well (AMD64 Architecture Programmer's Manual,
/// volume 1, 3.1.2.3).
fn without(register: Register, full: u64) -> u64 {
    match register.size() {
        1 if matches!(register, Register::AH | Register::BH | Register::CH | Register::DH) => full & !0xff00,
        1 => full & !0xff,
        2 => full & !0xffff,
        _ => 0,
    }
}

/// Whether an instruction with memory as its first operand does nothing but store its second one there. Such as read the
/// memory too, set flags or count are not among them, nor those that store under a mask: no program uses them on a device.
fn stores_only(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Mov | Movnti
            | Movd
            | Movq
            | Movss
            | Movsd
            | Movups
            | Movupd
            | Movaps
            | Movapd
            | Movdqu
            | Movdqa
            | Movlps
            | Movlpd
            | Movhps
            | Movhpd
            | Movntps
            | Movntpd
            | Movntdq
            | Movntq
            | Vmovd
            | Vmovq
            | Vmovss
            | Vmovsd
            | Vmovups
            | Vmovupd
            | Vmovaps
            | Vmovapd
            | Vmovdqu
            | Vmovdqa
            | Vmovlps
            | Vmovlpd
            | Vmovhps
            | Vmovhpd
            | Vmovntps
            | Vmovntpd
            | Vmovntdq
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x40_1000;

    /// The general registers have their encoding's number times 0x1_0000_0010.
    fn value(register: Register) -> Option<u64> {
        register.is_gpr64().then(|| register.number() as u64 * 0x1_0000_0010)
    }

    fn store(bytes: &[u8]) -> (u64, u64) {
        match look(bytes, AT, value) {
            Found::Store(store) => {
                assert_eq!(store.next, AT + bytes.len() as u64, "{bytes:x?}");
                (store.address, store.size)
            }
            other => panic!("{bytes:x?}: {other:?}"),
        }
    }

    /// Encodings as GNU as 2.40 makes them.
    #[test]
    fn stores_of_all_sizes() {
        let cases: &[(&[u8], u64, u64)] = &[
            // movb $1,(%rcx); movb %al,4(%rcx)
            (&[0xc6, 0x01, 0x01], 0x1_0000_0010, 1),
            (&[0x88, 0x41, 0x04], 0x1_0000_0014, 1),
            // movw $1,(%rcx)
            (&[0x66, 0xc7, 0x01, 0x01, 0x00], 0x1_0000_0010, 2),
            // movl $1,(%rcx); movl %r15d,(%rcx); movl $1,(%rcx,%rdx,4)
            (&[0xc7, 0x01, 0x01, 0x00, 0x00, 0x00], 0x1_0000_0010, 4),
            (&[0x44, 0x89, 0x39], 0x1_0000_0010, 4),
            (&[0xc7, 0x04, 0x91, 0x01, 0x00, 0x00, 0x00], 0x1_0000_0010 + 4 * 0x2_0000_0020, 4),
            // movl %eax,(%ecx): the address is the low half
            (&[0x67, 0x89, 0x01], 0x10, 4),
            // movl $1,0x10(%rip)
            (&[0xc7, 0x05, 0x10, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00], AT + 10 + 0x10, 4),
            // movabs %eax,0x1122334455667788
            (&[0xa3, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11], 0x1122_3344_5566_7788, 4),
            // movq $1,(%rcx); movnti %eax,(%rcx)
            (&[0x48, 0xc7, 0x01, 0x01, 0x00, 0x00, 0x00], 0x1_0000_0010, 8),
            (&[0x0f, 0xc3, 0x01], 0x1_0000_0010, 4),
            // movd %xmm0,(%rcx); movq %xmm0,(%rcx); movss %xmm0,(%rcx); movups %xmm0,(%rcx)
            (&[0x66, 0x0f, 0x7e, 0x01], 0x1_0000_0010, 4),
            (&[0x66, 0x0f, 0xd6, 0x01], 0x1_0000_0010, 8),
            (&[0xf3, 0x0f, 0x11, 0x01], 0x1_0000_0010, 4),
            (&[0x0f, 0x11, 0x01], 0x1_0000_0010, 16),
            // vmovd %xmm0,(%rcx); vmovups %ymm0,(%rcx)
            (&[0xc5, 0xf9, 0x7e, 0x01], 0x1_0000_0010, 4),
            (&[0xc5, 0xfc, 0x11, 0x01], 0x1_0000_0010, 32),
        ];
        for (bytes, address, size) in cases {
            assert_eq!(store(bytes), (*address, *size), "{bytes:x?}");
        }
    }

    /// What compilers make of `__atomic_store_n(p, v, __ATOMIC_SEQ_CST)` and of `__atomic_exchange_n`; encodings as above.
    #[test]
    fn exchanges_load_nothing() {
        const FULL: u64 = 0x1122_3344_5566_7788;
        let cases: &[(&[u8], u64, u64, Register, u64)] = &[
            // xchgl %edx,(%rcx); xchgq %rdx,8(%rcx); lock xchgl %r8d,(%rcx)
            (&[0x87, 0x11], FULL, 4, Register::RDX, 0),
            (&[0x48, 0x87, 0x51, 0x08], FULL + 8, 8, Register::RDX, 0),
            (&[0xf0, 0x44, 0x87, 0x01], FULL, 4, Register::R8, 0),
            // xchgq %rcx,(%rcx): the address is that of before
            (&[0x48, 0x87, 0x09], FULL, 8, Register::RCX, 0),
            // xchgw %dx,(%rcx); xchgb %dl,(%rcx); xchgb %dh,(%rcx): the rest of the register stays
            (&[0x66, 0x87, 0x11], FULL, 2, Register::RDX, 0x1122_3344_5566_0000),
            (&[0x86, 0x11], FULL, 1, Register::RDX, 0x1122_3344_5566_7700),
            (&[0x86, 0x31], FULL, 1, Register::RDX, 0x1122_3344_5566_0088),
        ];
        for (bytes, address, size, register, after) in cases {
            let next = AT + bytes.len() as u64;
            let store = Store { address: *address, size: *size, next, loads: Some((*register, *after)) };
            assert_eq!(look(bytes, AT, |_| Some(FULL)), Found::Store(store), "{bytes:x?}");
        }
        // movl %edx,(%rcx)
        assert!(matches!(look(&[0x89, 0x11], AT, value), Found::Store(Store { loads: None, .. })));
        // xchgl %eax,%fs:(%rcx)
        assert_eq!(look(&[0x64, 0x87, 0x01], AT, value), Found::Other);
    }

    #[test]
    fn what_is_no_store_alone() {
        let cases: &[&[u8]] = &[
            &[0x8b, 0x01],             // movl (%rcx),%eax
            &[0x89, 0xc8],             // movl %ecx,%eax
            &[0x83, 0x09, 0x01],       // orl $1,(%rcx)
            &[0x87, 0xc1],             // xchgl %eax,%ecx
            &[0x0f, 0xc1, 0x01],       // xaddl %eax,(%rcx)
            &[0x0f, 0xb1, 0x11],       // cmpxchgl %edx,(%rcx)
            &[0xf0, 0xff, 0x01],       // lock incl (%rcx)
            &[0xf3, 0xaa],             // rep stosb
            &[0xa5],                   // movsl
            &[0x64, 0x89, 0x01],       // movl %eax,%fs:(%rcx)
            &[0x0f, 0x0b],             // ud2
            &[0xc5, 0xf9, 0x7e, 0xc1], // vmovd %xmm0,%ecx
        ];
        for bytes in cases {
            assert_eq!(look(bytes, AT, value), Found::Other, "{bytes:x?}");
        }
        assert_eq!(look(&[0xc7, 0x01, 0x01], AT, value), Found::Longer);
        assert_eq!(look(&[], AT, value), Found::Longer);
    }
}
